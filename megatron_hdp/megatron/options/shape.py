"""The shape of the model that a run's options describe."""

from __future__ import annotations

from pathlib import Path

from megatron_hdp.megatron.options.arguments import (
    TrainingArguments,
    head_sizes,
    stage_split,
    with_derived_defaults,
)
from megatron_hdp.megatron.options.checks import check_model
from megatron_hdp.megatron.options.layer_patterns import check_windows, expert_layers, layer_windows
from megatron_hdp.megatron.options.model_options import (
    MlaOptions,
    ModelOptions,
    MoeOptions,
    PositionOptions,
)
from megatron_hdp.megatron.options.parsing import build_parser
from megatron_hdp.megatron.options.position_checks import check_positions, layers_without_positions
from megatron_hdp.options import OptionError, check_values, from_namespace, yaml_to_argv
from megatron_hdp.planner.shape import Attention, Layer, Mlp, ModelShape, Router
from megatron_hdp.planner.stages import LayerCosts, stage_weights


def model_shape(arguments: TrainingArguments, vocab_size: int) -> ModelShape:
    """The model, layer by layer.

    Args:
        arguments: derived defaults filled in.
        vocab_size: entries, padded or not.
    """
    norm_bias = arguments.normalization == "LayerNorm"
    further = Layer(
        hidden_size=arguments.hidden_size,
        attention=_attention(arguments, knows_positions=True, window=None),
        mlp=_mlp(arguments, expert_layers(arguments)[-1]),
        norm_bias=norm_bias,
    )
    skipped = layers_without_positions(arguments) or (0,) * arguments.num_layers
    windows = layer_windows(arguments)
    return ModelShape(
        layers=tuple(
            Layer(
                hidden_size=arguments.hidden_size,
                attention=_attention(arguments, not skips, window),
                mlp=_mlp(arguments, has_experts),
                norm_bias=norm_bias,
            )
            for skips, has_experts, window in zip(
                skipped, expert_layers(arguments), windows, strict=True
            )
        ),
        hidden_size=arguments.hidden_size,
        vocab_size=vocab_size,
        tied_embeddings=not arguments.untie_embeddings_and_output_weights,
        norm_bias=norm_bias,
        further=(further,) * (arguments.mtp_num_layers or 0),
    )


def _attention(
    arguments: TrainingArguments, knows_positions: bool, window: int | None
) -> Attention:
    """Of one layer."""
    turns = knows_positions and arguments.position_embedding_type != "none"
    qk_channels, v_channels = head_sizes(arguments)
    latent, turned = {}, arguments.kv_channels
    if arguments.multi_latent_attention:
        turned = arguments.qk_pos_emb_head_dim
        latent = {
            "kv_rank": arguments.kv_lora_rank,
            "q_rank": arguments.q_lora_rank or 0,
            "shared_channels": turned,
        }
    return Attention(
        num_heads=arguments.num_attention_heads,
        num_groups=arguments.num_query_groups,
        qk_channels=qk_channels,
        v_channels=v_channels,
        rotary_channels=int(turned * arguments.rotary_percent) if turns else 0,
        qkv_bias=(arguments.add_bias_linear or arguments.add_qkv_bias) and not latent,
        output_bias=arguments.add_bias_linear,
        qk_norm=arguments.qk_layernorm,
        norm_bias=arguments.normalization == "LayerNorm",
        window=window,
        has_sink=arguments.softmax_type == "learnable",
        **latent,
    )


def _mlp(arguments: TrainingArguments, has_experts: bool) -> Mlp:
    """A layer's MLP, or its mixture of experts."""
    gated = arguments.swiglu or arguments.quick_geglu
    if not has_experts:
        return Mlp(
            ffn_hidden_size=arguments.ffn_hidden_size, gated=gated, bias=arguments.add_bias_linear
        )
    experts = arguments.num_experts or 1
    return Mlp(
        ffn_hidden_size=arguments.moe_ffn_hidden_size or arguments.ffn_hidden_size,
        gated=gated,
        bias=arguments.add_bias_linear,
        num_experts=experts,
        experts_per_token=min(arguments.moe_router_topk, experts),
        router=Router(
            sigmoid=arguments.moe_router_score_function == "sigmoid",
            bias=arguments.moe_router_enable_expert_bias,
            groups=arguments.moe_router_num_groups is not None,
            float32=arguments.moe_router_dtype == "fp32",
        ),
        shared_ffn_hidden_size=arguments.moe_shared_expert_intermediate_size or 0,
        shared_gate=arguments.moe_shared_expert_gate,
    )


def shape_in(path: Path) -> ModelShape:
    """The model that a YAML file of flags describes; keys that say nothing about it are left out.

    Its vocabulary is that of ``vocab-size``, 0 where there is none.

    Raises:
        OptionError: keys that are unknown, missing, or do not go together.
    """
    parser = build_parser()
    namespace = parser.parse_args(yaml_to_argv(path, parser, skip_others=True))
    namespace.seq_length = namespace.tensor_model_parallel_size = 1  # which a shape has not
    try:
        for group in (ModelOptions, PositionOptions, MlaOptions, MoeOptions):
            check_values(from_namespace(group, namespace))
        arguments = with_derived_defaults(from_namespace(TrainingArguments, namespace))
        check_model(arguments)
        check_positions(arguments)
        check_windows(arguments)
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from None
    return model_shape(arguments, arguments.vocab_size or 0)


def planned_weights(arguments: TrainingArguments, vocab_size: int) -> tuple[float, ...] | None:
    """Relative time of every virtual stage; None where all do the same.

    Args:
        arguments: derived defaults filled in.
        vocab_size: padded.
    """
    tokens = min(arguments.hdp_tokens_per_rank, arguments.seq_length)
    shape = model_shape(arguments, vocab_size)
    costs = LayerCosts.of_shape(shape, tokens, arguments.recompute_granularity)
    return stage_weights(stage_split(arguments), costs)
