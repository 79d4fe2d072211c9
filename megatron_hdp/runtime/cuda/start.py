"""What CUDA reads from the environment once, when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_hdp.runtime.cuda.device import Run, Setting

_MOST = 32
_BLACKWELL = (10, 0)


class Connections:
    """Into how many hardware queues CUDA sorts a process's streams.

    CUDA reads ``CUDA_DEVICE_MAX_CONNECTIONS`` (1 to 32, 8 unless set) once, when it starts. Streams
    that share a queue run in the order of their launches, whatever they wait for.

    - One queue is what Megatron demands with tensor parallelism before Blackwell: it launches a
      collective before the product that shall hide it, and relies on their starting in that order.
    - Rings, gradient sync and copies to the host want queues of their own. In a shared one a copy
      that waits for its event holds up everything launched after it, computation too.
    - Where both are wanted Megatron's demand wins. Results are the same either way.
    """

    variable = "CUDA_DEVICE_MAX_CONNECTIONS"

    @staticmethod
    def wanted(run: Run) -> Setting | None:
        """What a run wants; None where CUDA's own number, or no GPU, will do."""
        if run.capability is None:
            return None
        if run.tensor_parallel and run.capability < _BLACKWELL:
            why = (
                "tensor-parallel communication overlaps only if it starts in the order of launches"
            )
            return Setting("1", why)
        if run.hybrid_data_parallel:
            why = "rings, gradient sync and copies to the host must not queue behind each other"
            return Setting(str(_MOST), why)
        return None

    @staticmethod
    def doubt(want: Setting, environment: Mapping[str, str]) -> str | None:
        """What is to be said of the user's value: one line, or None if it is as good.

        Raises:
            ValueError: CUDA does not take it.
        """
        found = environment[Connections.variable]
        if not found.isdecimal() or not 1 <= int(found) <= _MOST:
            raise ValueError(
                f"{Connections.variable} is {found!r}, expected a number from 1 to {_MOST}: "
                f"unset it, and {want.value} is used"
            )
        if (int(found) == 1) == (want.value == "1"):
            return None
        return f"{Connections.variable}={found} is kept, {want.value} would be faster: {want.why}"

    @classmethod
    def values(cls, run: Run) -> str:
        """For people: what a run sets, with and without tensor parallelism."""
        plain, parallel = (cls.wanted(replace(run, tensor_parallel=one)) for one in (False, True))
        assert plain is not None and parallel is not None
        if parallel.value == plain.value:
            return f"{plain.value} with HDP"
        return f"{plain.value} with HDP, {parallel.value} with tensor parallelism"


class ModuleLoading:
    """When CUDA loads a kernel: at the start, not in the middle of a ring.

    From 12.2 on CUDA loads a kernel with its first launch, unless ``CUDA_MODULE_LOADING`` is
    ``EAGER`` when it starts. Loading may wait for all that runs on the device, messages of rings
    and reductions of gradients too, which wait for other ranks. Under HDP ranks meet new shapes, so
    new kernels, in any micro-batch: each then stands still until the others have come, and for ever
    if they wait for what it would launch next. The order of messages leaves no such case
    (`planner.lockstep`); other libraries' may. Loading all kernels at the start costs seconds, and
    memory of the device.
    """

    variable = "CUDA_MODULE_LOADING"

    @staticmethod
    def wanted(run: Run) -> Setting | None:
        """What a run wants; None where it has no rings, or no GPU."""
        if run.capability is None or not run.hybrid_data_parallel:
            return None
        why = "loading a kernel in the middle of a ring waits for the device, so for other ranks"
        return Setting("EAGER", why)

    @staticmethod
    def doubt(want: Setting, environment: Mapping[str, str]) -> str | None:
        """One line if the user's value is another one."""
        found = environment[ModuleLoading.variable]
        if found == want.value:
            return None
        return f"{ModuleLoading.variable}={found} is kept, and ranks may stand still: {want.why}"

    @classmethod
    def values(cls, run: Run) -> str:
        """For people: what a run sets."""
        want = cls.wanted(run)
        assert want is not None
        return f"{want.value} with HDP"
