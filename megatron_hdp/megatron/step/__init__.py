"""A step of a run: draw and plan it, agree on it, run this rank's micro-batches, report."""

from megatron_hdp.megatron.step.figures import (
    EvaluationLoss,
    FurtherLosses,
    SourceFigures,
    StepFigures,
    StepReport,
    figure,
    over_all_ranks,
)
from megatron_hdp.megatron.step.hdp_steps import HdpSteps
from megatron_hdp.megatron.step.learning import speeds_at
from megatron_hdp.megatron.step.loading import (
    DataPlane,
    has_documents,
    join_data_plane,
    loaders_spec,
    open_split,
    split_specs,
)
from megatron_hdp.megatron.step.non_finite import (
    NonFinite,
    NonFiniteError,
    gather_words,
    non_finite_parameters,
)
from megatron_hdp.megatron.step.preparation import (
    batch_size_of,
    data_order,
    plan_settings,
    reader_of,
)
from megatron_hdp.megatron.step.reference import Reference, StepsLeft
from megatron_hdp.megatron.step.reference_sums import ReferenceSums
from megatron_hdp.megatron.step.setup import build_executor, cost_model_of
from megatron_hdp.megatron.step.stock_steps import StockSteps, build_datasets

__all__ = [
    "DataPlane",
    "EvaluationLoss",
    "FurtherLosses",
    "HdpSteps",
    "NonFinite",
    "NonFiniteError",
    "Reference",
    "ReferenceSums",
    "SourceFigures",
    "StepFigures",
    "StepReport",
    "StepsLeft",
    "StockSteps",
    "batch_size_of",
    "build_datasets",
    "build_executor",
    "cost_model_of",
    "data_order",
    "figure",
    "gather_words",
    "has_documents",
    "join_data_plane",
    "loaders_spec",
    "non_finite_parameters",
    "open_split",
    "over_all_ranks",
    "plan_settings",
    "reader_of",
    "speeds_at",
    "split_specs",
]
