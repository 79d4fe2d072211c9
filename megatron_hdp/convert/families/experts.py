"""What families with experts share: sizes, flags, and layers of which the first are dense."""

from __future__ import annotations

from typing import Any

from megatron_hdp.convert.families import rows
from megatron_hdp.convert.families.flags import sizes_of
from megatron_hdp.convert.families.table import Config, Layers

_NUM_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")


def expert_sizes(config: Config) -> dict[str, int]:
    """What tables speak of where there are experts."""
    ffn = config.get("moe_intermediate_size") or config["intermediate_size"]
    found = {
        **sizes_of(config),
        "experts": next(config[name] for name in _NUM_EXPERTS if config.get(name)),
        "expert_ffn": ffn,
    }
    if shared := config.get("n_shared_experts"):
        found["shared_ffn"] = shared * ffn
    return found


def expert_flags(config: Config) -> dict[str, Any]:
    """The flags of experts without a bias in their choice."""
    sizes = expert_sizes(config)
    return {
        "num_experts": sizes["experts"],
        "moe_ffn_hidden_size": sizes["expert_ffn"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": config.get("router_aux_loss_coef", 0.0),
        "moe_token_dispatcher_type": "alltoall",
    }


def sigmoid_flags(config: Config) -> dict[str, Any]:
    """The flags of experts chosen by sigmoid scores and a bias, the first layers being dense.

    Raises:
        ValueError: groups are chosen by more or less experts than in Megatron.
    """
    sizes, groups = expert_sizes(config), config.get("n_group") or 1
    flags = {
        **expert_flags(config),
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        "moe_router_topk_scaling_factor": float(config["routed_scaling_factor"]),
        "moe_shared_expert_intermediate_size": sizes["shared_ffn"],
    }
    if first := config["first_k_dense_replace"]:
        flags["moe_layer_freq"] = f"[0]*{first}+[1]*{sizes['layers'] - first}"
    if groups > 1:
        flags["moe_router_num_groups"] = groups
        flags["moe_router_group_topk"] = config["topk_group"]
        if config["num_experts_per_tok"] // config["topk_group"] != 2:
            raise ValueError(
                f"found num_experts_per_tok {config['num_experts_per_tok']} of topk_group "
                f"{config['topk_group']} groups, expected two in each: transformers scores a group "
                "by its two best experts, Megatron by as many as it gives"
            )
    return flags


FIRST_DENSE = (
    Layers(rows.MLP, lambda config, layer: layer < config["first_k_dense_replace"]),
    Layers(
        (*rows.EXPERTS, *rows.EXPERT_BIAS, *rows.SHARED_EXPERTS),
        lambda config, layer: layer >= config["first_k_dense_replace"],
    ),
)
"""Plain MLPs in the first layers, experts with a bias and shared ones in the others."""


def mtp_layers(config: Config) -> tuple[str, ...]:
    """Patterns of the MTP layers behind the last layer, which are not converted."""
    first, number = config["num_hidden_layers"], config.get("num_nextn_predict_layers") or 0
    return tuple(f"model.layers.{layer}.*" for layer in range(first, first + number))
