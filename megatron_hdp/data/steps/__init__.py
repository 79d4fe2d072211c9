"""What each rank gets of a step: drawn and planned as a whole, cut into shares, tokens read."""

from megatron_hdp.data.steps.loaders import Loaders, LocalLoaders
from megatron_hdp.data.steps.micro_batch import (
    RankMicroBatch,
    Reader,
    TokenSource,
    padding_micro_batch,
    read_micro_batch,
)
from megatron_hdp.data.steps.planning import PlannedStep, PlanSettings, StepPlanner
from megatron_hdp.data.steps.rank_step import RankStep, read_step
from megatron_hdp.data.steps.share import RankShare, shares_of
from megatron_hdp.data.steps.totals import Amounts, StepTotals

__all__ = [
    "Amounts",
    "Loaders",
    "LocalLoaders",
    "PlanSettings",
    "PlannedStep",
    "RankMicroBatch",
    "RankShare",
    "RankStep",
    "Reader",
    "StepPlanner",
    "StepTotals",
    "TokenSource",
    "padding_micro_batch",
    "read_micro_batch",
    "read_step",
    "shares_of",
]
