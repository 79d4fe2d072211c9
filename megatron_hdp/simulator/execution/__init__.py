"""Runs plans as the runtime does, event by event: rings, stages, copies, gradient sync, memory.

`machine` says what a step takes besides the cost model, `step` runs one plan, `run` several steps
of several strategies.
"""

from megatron_hdp.simulator.execution.failures import (
    FAILURE_KEYS,
    Failures,
    Forecast,
    useful_share,
)
from megatron_hdp.simulator.execution.machine import Machine, read_changes
from megatron_hdp.simulator.execution.memory import MemoryCosts, MemoryTrace
from megatron_hdp.simulator.execution.noise import Disturbance
from megatron_hdp.simulator.execution.run import (
    REPORT_KEYS,
    Outcome,
    Run,
    Setting,
    outcome_of,
    simulate,
)
from megatron_hdp.simulator.execution.step import StepExecution, StepRecord, execute

__all__ = [
    "FAILURE_KEYS",
    "REPORT_KEYS",
    "Disturbance",
    "Failures",
    "Forecast",
    "Machine",
    "MemoryCosts",
    "MemoryTrace",
    "Outcome",
    "Run",
    "Setting",
    "StepExecution",
    "StepRecord",
    "execute",
    "outcome_of",
    "read_changes",
    "simulate",
    "useful_share",
]
