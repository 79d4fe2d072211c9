"""The families of models that can be converted: what their configurations and tensors mean."""

from __future__ import annotations

from typing import Any

from megatron_hdp.convert import rows
from megatron_hdp.convert.flags import plain_flags, sizes_of
from megatron_hdp.convert.table import Config, Family, Layers, Row

_ROTATION = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
"""In old files of Llama: follows from the configuration."""


def _plain(**more: Any) -> Any:
    """Flags of a dense model, and some more."""
    return lambda config: {**plain_flags(config), **more}


def _expert_sizes(config: Config) -> dict[str, int]:
    experts = config.get("num_experts") or config["num_local_experts"]
    ffn = config.get("moe_intermediate_size") or config["intermediate_size"]
    return {**sizes_of(config), "experts": experts, "expert_ffn": ffn}


def _expert_flags(config: Config) -> dict[str, Any]:
    sizes = _expert_sizes(config)
    return {
        "num_experts": sizes["experts"],
        "moe_ffn_hidden_size": sizes["expert_ffn"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": config.get("router_aux_loss_coef", 0.0),
        "moe_token_dispatcher_type": "alltoall",
    }


def _mixtral_flags(config: Config) -> dict[str, Any]:
    return {**plain_flags(config), **_expert_flags(config)}


def _qwen3_moe_flags(config: Config) -> dict[str, Any]:
    return {
        **plain_flags(config),
        **_expert_flags(config),
        "qk_layernorm": True,
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
    }


_MIXTRAL_EXPERTS = (
    Row("mlp.router.weight", {"block_sparse_moe.gate.weight": "experts hidden"}),
    Row(
        "mlp.experts.experts.linear_fc1.weight",
        {
            "block_sparse_moe.experts.{e}.w1.weight": "expert_ffn hidden",
            "block_sparse_moe.experts.{e}.w3.weight": "expert_ffn hidden",
        },
    ),
    Row(
        "mlp.experts.experts.linear_fc2.weight",
        {"block_sparse_moe.experts.{e}.w2.weight": "hidden expert_ffn"},
    ),
)

_EXPECTED_OF_ALL = {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)}
_NO_WINDOW = {"sliding_window": (None,)}
_WINDOW_OFF = {"use_sliding_window": (False,)}

FAMILIES = (
    Family(
        name="Llama 2 and 3, Mistral",
        architectures=("LlamaForCausalLM", "MistralForCausalLM"),
        sizes=sizes_of,
        flags=_plain(),
        outer=rows.OUTER,
        layers=(Layers((*rows.NORMS, *rows.ATTENTION, *rows.MLP)),),
        expected={**_EXPECTED_OF_ALL, **_NO_WINDOW},
        derived=_ROTATION,
    ),
    Family(
        name="Qwen2.5",
        architectures=("Qwen2ForCausalLM",),
        sizes=sizes_of,
        flags=_plain(add_qkv_bias=True),
        outer=rows.OUTER,
        layers=(Layers((*rows.NORMS, *rows.ATTENTION, *rows.QKV_BIAS, *rows.MLP)),),
        expected={**_EXPECTED_OF_ALL, **_WINDOW_OFF},
    ),
    Family(
        name="Qwen3",
        architectures=("Qwen3ForCausalLM",),
        sizes=sizes_of,
        flags=_plain(qk_layernorm=True),
        outer=rows.OUTER,
        layers=(Layers((*rows.NORMS, *rows.ATTENTION, *rows.QK_NORMS, *rows.MLP)),),
        expected={**_EXPECTED_OF_ALL, **_WINDOW_OFF},
    ),
    Family(
        name="Mixtral",
        architectures=("MixtralForCausalLM",),
        sizes=_expert_sizes,
        flags=_mixtral_flags,
        outer=rows.OUTER,
        layers=(Layers((*rows.NORMS, *rows.ATTENTION, *_MIXTRAL_EXPERTS)),),
        expected={**_EXPECTED_OF_ALL, **_NO_WINDOW},
    ),
    Family(
        name="Qwen3-MoE",
        architectures=("Qwen3MoeForCausalLM",),
        sizes=_expert_sizes,
        flags=_qwen3_moe_flags,
        outer=rows.OUTER,
        layers=(Layers((*rows.NORMS, *rows.ATTENTION, *rows.QK_NORMS, *rows.EXPERTS)),),
        expected={
            **_EXPECTED_OF_ALL,
            **_WINDOW_OFF,
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([],),
        },
    ),
)


def family_of(config: Config, where: str) -> Family:
    """The family of a configuration.

    Args:
        config: of the model.
        where: it was found, for messages.

    Raises:
        ValueError: there is none, or its table does not say what the configuration wants.
    """
    found = (config.get("architectures") or [config.get("model_type")])[0]
    family = next((one for one in FAMILIES if found in one.architectures), None)
    if family is None:
        known = [name for one in FAMILIES for name in one.architectures]
        raise ValueError(
            f"{where}: found the architecture {found}, expected one of {', '.join(known)}: others "
            "need a table of their own (megatron_hdp/convert/families.py)"
        )
    for key, allowed in family.expected.items():
        if key in config and config[key] not in allowed:
            raise ValueError(
                f"{where}: found {key} {config[key]} in a model of {family.name}, expected "
                f"{' or '.join(map(str, allowed))}: what training knows of it has nothing else"
            )
    return family
