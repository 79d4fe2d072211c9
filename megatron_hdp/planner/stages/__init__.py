"""How a model is cut into pipeline stages: the layers of each part, and the time it takes."""

from megatron_hdp.planner.stages.layout import parts_of
from megatron_hdp.planner.stages.split import StageSplit, waiting_passes
from megatron_hdp.planner.stages.weights import LayerCosts, stage_weights

__all__ = ["LayerCosts", "StageSplit", "parts_of", "stage_weights", "waiting_passes"]
