"""Items of multimodal steps: images, videos, sounds, and which ranks encode them."""

from megatron_hdp.media.apart import with_items_apart
from megatron_hdp.media.cost import ItemCostModel
from megatron_hdp.media.encoders import ENCODERS, Encoder, Limits, Resizing, Windows
from megatron_hdp.media.evaluation import ItemFigures, evaluate_items, items_bound_s
from megatron_hdp.media.gaps import (
    PipelineGaps,
    gap_choices,
    gaps_of,
    slots_of_micro_batches,
)
from megatron_hdp.media.items import ItemBatch, ItemPlan, ItemPlanError
from megatron_hdp.media.lanes import ItemLanes, item_lanes
from megatron_hdp.media.learnt_cost import LearntCost
from megatron_hdp.media.patches import Patches, Sound
from megatron_hdp.media.planning import dealt, plan_in_gaps, plan_items
from megatron_hdp.media.positions import MRope, RowGrid, row_positions
from megatron_hdp.media.waves import wave_choices
from megatron_hdp.options import BALANCES as ITEM_STRATEGIES
from megatron_hdp.options import PATCHES_PER_PACK

__all__ = [
    "ENCODERS",
    "ITEM_STRATEGIES",
    "PATCHES_PER_PACK",
    "Encoder",
    "ItemBatch",
    "ItemCostModel",
    "ItemFigures",
    "ItemLanes",
    "ItemPlan",
    "ItemPlanError",
    "LearntCost",
    "Limits",
    "MRope",
    "Patches",
    "PipelineGaps",
    "Resizing",
    "RowGrid",
    "Sound",
    "Windows",
    "dealt",
    "evaluate_items",
    "gap_choices",
    "gaps_of",
    "item_lanes",
    "items_bound_s",
    "plan_in_gaps",
    "plan_items",
    "row_positions",
    "slots_of_micro_batches",
    "wave_choices",
    "with_items_apart",
]
