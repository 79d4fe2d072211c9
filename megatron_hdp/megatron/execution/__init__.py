"""One rank's micro-batches of a step, run by Megatron's own schedule, DDP and finalisation.

Design: `docs/design/pipelines.md`.
"""

from megatron_hdp.megatron.execution.executor import HdpExecutor, RankOutcome, in_mode
from megatron_hdp.megatron.execution.own_loss import OwnLoss
from megatron_hdp.megatron.execution.param_gather import make_parameters_whole, make_whole

__all__ = [
    "HdpExecutor",
    "OwnLoss",
    "RankOutcome",
    "in_mode",
    "make_parameters_whole",
    "make_whole",
]
