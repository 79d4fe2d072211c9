"""When CUDA loads a kernel: at the start, not in the middle of a ring.

From 12.2 on CUDA loads a kernel with its first launch, unless ``CUDA_MODULE_LOADING`` is ``EAGER``
when it starts. Loading may wait for all that runs on the device, messages of rings and reductions
of gradients too, which wait for other ranks. Under HDP ranks meet new shapes, so new kernels, in
any micro-batch: each then stands still until the others have come, and for ever if they wait for
what it would launch next. The order of messages leaves no such case (`planner.lockstep`); other
libraries' may. Loading all kernels at the start costs seconds, and memory of the device.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_hdp.runtime.cuda.device import Run, Setting

VARIABLE = "CUDA_MODULE_LOADING"


def wanted(run: Run) -> Setting | None:
    """What a run wants; None where it has no rings, or no GPU."""
    if run.capability is None or not run.hybrid_data_parallel:
        return None
    why = "loading a kernel in the middle of a ring waits for the device, so for other ranks"
    return Setting("EAGER", why)


def doubt(want: Setting, environment: Mapping[str, str]) -> str | None:
    """One line if the user's value is another one."""
    found = environment[VARIABLE]
    if found == want.value:
        return None
    return f"{VARIABLE}={found} is kept, and ranks may stand still: {want.why}"


def values(run: Run) -> str:
    """For people: what a run sets."""
    want = wanted(run)
    assert want is not None
    return f"{want.value} with HDP"
