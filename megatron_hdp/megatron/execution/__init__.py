"""One rank's micro-batches of a step, run by Megatron's own schedule, DDP and finalisation.

Design: `docs/design/pipelines.md`.
"""

from megatron_hdp.megatron.execution.executor import HdpExecutor, RankOutcome
from megatron_hdp.megatron.execution.own_loss import OwnLoss
from megatron_hdp.megatron.execution.param_gather import make_parameters_whole

__all__ = ["HdpExecutor", "OwnLoss", "RankOutcome", "make_parameters_whole"]
