"""How PyTorch asks for a GPU's memory: in segments that grow, because shapes never repeat.

By default its allocator keeps what it got in blocks of the sizes that were asked for. Under HDP
each micro-batch has a size of its own, so blocks of old sizes stay behind, and memory runs out
though much of it is free. With ``expandable_segments:True`` a segment's end is moved instead.

PyTorch 2.13 reads ``PYTORCH_CUDA_ALLOC_CONF``, and only where that is not set
``PYTORCH_ALLOC_CONF``; other releases take the second name first. Both know both. Here the first
name is set, which is the one that Megatron looks at before it does what expandable segments
exclude, and only where neither is.

What expandable segments exclude:

- pools of memory of another kind (``torch.cuda.MemPool``), in which Megatron registers buffers with
  NCCL (``--use-nccl-ub``): it refuses both together
- registering all that is allocated with NCCL: PyTorch switches that off
- WSL, some of whose drivers fail

CUDA graphs need ``NCCL_GRAPH_REGISTER=0`` with them; HDP has none.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping

from megatron_hdp.runtime.cuda.device import Run, Setting

VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
OTHER_NAME = "PYTORCH_ALLOC_CONF"
_KEY = "expandable_segments"
_REGISTERS_ALL = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"


def wanted(run: Run) -> Setting | None:
    """What a run wants; None where micro-batches have one size, or there is no GPU."""
    if run.capability is None or not run.hybrid_data_parallel:
        return None
    why = "micro-batches have sizes of their own, and blocks of old sizes would stay behind"
    return Setting(f"{_KEY}:True", why)


def obstacle(run: Run, environment: Mapping[str, str]) -> str | None:
    """What expandable segments do not go together with in this run; None if they do."""
    if run.registers_buffers:
        return "--use-nccl-ub registers buffers in a pool that cannot have them"
    if environment.get(_REGISTERS_ALL, "0").lower() in ("1", "true", "t", "yes", "y"):
        return f"{_REGISTERS_ALL} would be switched off by them"
    if "microsoft" in platform.release().lower():
        return "drivers under WSL may fail with them"
    return None


def found_in(environment: Mapping[str, str]) -> str | None:
    """The name that the user has set, of the two; None if neither is."""
    return next((name for name in (VARIABLE, OTHER_NAME) if name in environment), None)


def doubt(want: Setting, environment: Mapping[str, str]) -> str | None:
    """One line if the user's settings say nothing of segments; whatever they say is meant so."""
    name = found_in(environment)
    assert name is not None
    if _KEY in environment[name]:
        return None
    return (
        f"{name}={environment[name]} is kept, with {want.value} in it less memory would be lost: "
        f"{want.why}"
    )
