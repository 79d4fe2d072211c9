"""The options that describe a model which another framework has built from Megatron's classes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatron_hdp.megatron.options import (
    HybridArguments,
    ParallelOptions,
    TrainingArguments,
    check_layout,
    options_of_pattern,
)
from megatron_hdp.options import HdpOptions, OptionError, check_values

_RENAMED = {
    "num_experts": "num_moe_experts",
    "norm_epsilon": "layernorm_epsilon",
    "swiglu": "gated_linear_unit",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
}
"""Options by what Megatron's ``TransformerConfig`` calls them."""
_WRITTEN = ("moe_layer_freq", "no_rope_freq", "window_attn_skip_freq")
"""Numbers or lists there, text in options."""
_OF_HDP = {item.name for item in fields(HdpOptions)}


def built_as(model: Any) -> dict[str, Any]:
    """What `arguments_of_model` wants to know of a model beside its configuration."""
    return {
        "tied_embeddings": model.share_embeddings_and_output_weights,
        "hybrid_layer_pattern": getattr(model, "hybrid_layer_pattern", None),
    }


def arguments_of_model(
    config: Any,
    ddp_config: Any,
    *,
    seq_length: int,
    tied_embeddings: bool,
    hybrid_layer_pattern: str | None = None,
    stall_timeout_seconds: float | None = None,
    **of_hdp: Any,
) -> TrainingArguments:
    """The options of a run of such a model.

    Args:
        config: Megatron's ``TransformerConfig`` of it.
        ddp_config: its ``DistributedDataParallelConfig``.
        seq_length: tokens of the longest sequence.
        tied_embeddings: whether embedding and output share their weights.
        hybrid_layer_pattern: of a ``HybridModel``.
        stall_timeout_seconds: see `ParallelOptions`; without it nobody watches over ranks.
        of_hdp: fields of `HdpOptions`; ``hdp_tokens_per_rank`` must be among them.

    Raises:
        OptionError: options that do not exist, or that do not go together.
    """
    unknown = sorted(set(of_hdp) - _OF_HDP)
    if unknown:
        raise OptionError(
            f"found {', '.join(unknown)}, expected names of HDP's options: "
            f"{', '.join(sorted(_OF_HDP))}"
        )
    values = {}
    for item in fields(TrainingArguments):
        name = _RENAMED.get(item.name, item.name)
        if hasattr(config, name) and item.name not in _OF_HDP:
            values[item.name] = getattr(config, name)
    values["mtp_num_layers"] = values.get("mtp_num_layers") or None  # Megatron's may be 0
    for name in _WRITTEN:
        if values.get(name) is not None:
            values[name] = str(values[name])
    if values.get("window_size") is not None:
        values["window_size"] = ",".join(map(str, values["window_size"]))
    layout = values.get("pipeline_model_parallel_layout")
    if layout is not None:  # as the flag gives it: Megatron keeps what it was made from
        layout = values["pipeline_model_parallel_layout"] = getattr(layout, "input_data", layout)
        if not isinstance(layout, str):
            raise OptionError(
                f"found pipeline_model_parallel_layout {layout}, expected text as of Megatron's "
                "flag, like 'Et|tt|tL'"
            )
    kind: type[TrainingArguments] = TrainingArguments
    if hybrid_layer_pattern is not None:
        kind, of_pattern = HybridArguments, options_of_pattern(hybrid_layer_pattern)
        layout = of_pattern.get("pipeline_model_parallel_layout")
        values |= of_pattern
    if values.get("num_virtual_stages_per_pipeline_rank") == 1 or layout is not None:
        values["num_virtual_stages_per_pipeline_rank"] = None
    dtype = str(config.params_dtype)  # options are read without torch
    arguments = kind(
        **values
        | {
            "bf16": dtype == "torch.bfloat16",
            "fp64": dtype == "torch.float64",
            "group_query_attention": config.num_query_groups != config.num_attention_heads,
            "untie_embeddings_and_output_weights": not tied_embeddings,
            "use_distributed_optimizer": ddp_config.use_distributed_optimizer,
            "overlap_grad_reduce": ddp_config.overlap_grad_reduce,
            "stall_timeout_seconds": stall_timeout_seconds,
            "seq_length": seq_length,
            "max_position_embeddings": seq_length,
            "global_batch_size": 1,
            "train_iters": 1,
            "hybrid_data_parallel": True,
        }
        | of_hdp
    )
    check_values(ParallelOptions(stall_timeout_seconds=stall_timeout_seconds))  # type: ignore[arg-type]
    HdpOptions(**{name: getattr(arguments, name) for name in _OF_HDP}).validate(
        global_batch_size=1, attention_dropout=arguments.attention_dropout, train_iters=1
    )
    check_layout(arguments)
    return arguments
