"""The options of a training run under Megatron's own names: declared, derived, checked together."""

from megatron_hdp.megatron.options.arguments import (
    GROUPS,
    TrainingArguments,
    expert_domain_size,
    head_sizes,
    num_model_chunks,
    planned_layers,
    stage_split,
    tokenizer_of,
    without_virtual_stages,
)
from megatron_hdp.megatron.options.batch_sizes import check_batch_size, growth_of, sequences_of
from megatron_hdp.megatron.options.checks import (
    check_data,
    check_layout,
    check_mtp,
    virtual_stage_choices,
)
from megatron_hdp.megatron.options.fp8_checks import check_fp8, token_multiple
from megatron_hdp.megatron.options.groups import ParallelOptions
from megatron_hdp.megatron.options.hybrid import (
    HybridArguments,
    options_of_pattern,
    require_known_letters,
)
from megatron_hdp.megatron.options.layer_patterns import (
    check_windows,
    expert_layers,
    expert_layers_of_chunk,
    layer_frequency,
    layer_windows,
    pattern_of,
    window_settings,
    zeros_and_ones,
)
from megatron_hdp.megatron.options.media_checks import check_media
from megatron_hdp.megatron.options.mla_checks import check_latent_ring, check_mla
from megatron_hdp.megatron.options.model_options import MlaOptions, MoeOptions, PositionOptions
from megatron_hdp.megatron.options.moe_checks import check_dispatcher, check_moe
from megatron_hdp.megatron.options.parsing import build_parser, markdown_tables, parse_arguments
from megatron_hdp.megatron.options.position_checks import (
    check_positions,
    layers_without_positions,
    other_positions,
    position_record,
)
from megatron_hdp.megatron.options.preference_checks import check_preferences, given_preferences
from megatron_hdp.megatron.options.shape import (
    cost_model_of_job,
    job_of,
    known_speeds,
    model_shape,
    padded_vocab_size,
    planned_weights,
    shape_in,
    vocab_size_of,
)

__all__ = [
    "GROUPS",
    "HybridArguments",
    "MlaOptions",
    "MoeOptions",
    "ParallelOptions",
    "PositionOptions",
    "TrainingArguments",
    "build_parser",
    "check_batch_size",
    "check_data",
    "check_dispatcher",
    "check_fp8",
    "check_latent_ring",
    "check_layout",
    "check_media",
    "check_mla",
    "check_moe",
    "check_mtp",
    "check_positions",
    "check_preferences",
    "check_windows",
    "cost_model_of_job",
    "expert_domain_size",
    "expert_layers",
    "expert_layers_of_chunk",
    "given_preferences",
    "growth_of",
    "head_sizes",
    "job_of",
    "known_speeds",
    "layer_frequency",
    "layer_windows",
    "layers_without_positions",
    "markdown_tables",
    "model_shape",
    "num_model_chunks",
    "options_of_pattern",
    "other_positions",
    "padded_vocab_size",
    "parse_arguments",
    "pattern_of",
    "planned_layers",
    "planned_weights",
    "position_record",
    "require_known_letters",
    "sequences_of",
    "shape_in",
    "stage_split",
    "token_multiple",
    "tokenizer_of",
    "virtual_stage_choices",
    "vocab_size_of",
    "window_settings",
    "without_virtual_stages",
    "zeros_and_ones",
]
