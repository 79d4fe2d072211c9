"""What a run's settings depend on, and a setting: a value of a variable and why."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hdp.runtime.cuda.device import Capability


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is known of a run before CUDA starts."""

    capability: Capability | None
    """Of this machine's GPUs; None where there is none."""
    hybrid_data_parallel: bool
    tensor_parallel: bool = False
    """The run has tensor-parallel ranks."""
    registers_buffers: bool = False
    """Megatron registers buffers for gradients with NCCL (``--use-nccl-ub``)."""


@dataclass(frozen=True)
class Setting:
    """What a run sets a variable to."""

    value: str
    why: str
