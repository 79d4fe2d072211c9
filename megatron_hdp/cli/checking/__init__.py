"""What ``megatron-hdp check`` finds, and how it is told."""

from megatron_hdp.cli.checking.checks import check
from megatron_hdp.cli.checking.encoder import (
    encoder_of,
    encodes_in_gaps,
    gap_figures,
    planned_items,
    with_encoder,
)
from megatron_hdp.cli.checking.finding import Finding
from megatron_hdp.cli.checking.finding_text import as_json, as_text
from megatron_hdp.cli.checking.gpus import degree_refusals, job_of
from megatron_hdp.cli.checking.planned_step import cost_model_of, preset_batch, run_setting

__all__ = [
    "Finding",
    "as_json",
    "as_text",
    "check",
    "cost_model_of",
    "degree_refusals",
    "encoder_of",
    "encodes_in_gaps",
    "gap_figures",
    "job_of",
    "planned_items",
    "preset_batch",
    "run_setting",
    "with_encoder",
]
