"""What each rank gets of a step: drawn and planned as a whole, cut into shares, tokens read."""

from megatron_hdp.data.steps.loaders import (
    Loaders,
    LocalLoaders,
    LostSource,
    RankStep,
    WantedItem,
    read_step,
)
from megatron_hdp.data.steps.micro_batch import (
    FEWEST_TOKENS,
    Pieces,
    RankMicroBatch,
    Reader,
    TokenSource,
    padding_micro_batch,
    pieces_of,
    read_micro_batch,
)
from megatron_hdp.data.steps.planning import StepPlanner, items_apart, plan_by, shares_of
from megatron_hdp.data.steps.primitives import PrimitiveError, costed, untrained_weights
from megatron_hdp.data.steps.settings import PlannedStep, PlanSettings
from megatron_hdp.data.steps.share import PackedShares, RankShare, StepShares, work_of
from megatron_hdp.data.steps.totals import Amounts, StepTotals
from megatron_hdp.data.steps.unrelated import UnrelatedPlanner

__all__ = [
    "FEWEST_TOKENS",
    "Amounts",
    "Loaders",
    "LocalLoaders",
    "LostSource",
    "PackedShares",
    "Pieces",
    "PlanSettings",
    "PlannedStep",
    "PrimitiveError",
    "RankMicroBatch",
    "RankShare",
    "RankStep",
    "Reader",
    "StepPlanner",
    "StepShares",
    "StepTotals",
    "TokenSource",
    "UnrelatedPlanner",
    "WantedItem",
    "costed",
    "items_apart",
    "padding_micro_batch",
    "pieces_of",
    "plan_by",
    "read_micro_batch",
    "read_step",
    "shares_of",
    "untrained_weights",
    "work_of",
]
