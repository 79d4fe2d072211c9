"""Into how many hardware queues CUDA sorts a process's streams.

CUDA reads ``CUDA_DEVICE_MAX_CONNECTIONS`` (1 to 32, 8 unless set) once, when it starts. Streams
that share a queue run in the order of their launches, whatever they wait for.

- One queue is what Megatron demands with tensor parallelism before Blackwell: it launches a
  collective before the product that shall hide it, and relies on their starting in that order.
- Rings, gradient sync and copies to the host want queues of their own. In a shared one a copy that
  waits for its event holds up everything launched after it, computation too.
- Where both are wanted Megatron's demand wins. Results are the same either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_hdp.runtime.cuda.device import Run, Setting

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_MOST = 32
_BLACKWELL = (10, 0)


def wanted(run: Run) -> Setting | None:
    """What a run wants; None where CUDA's own number, or no GPU, will do."""
    if run.capability is None:
        return None
    if run.tensor_parallel and run.capability < _BLACKWELL:
        why = "tensor-parallel communication overlaps only when it starts in the order of launches"
        return Setting("1", why)
    if run.hybrid_data_parallel:
        why = "rings, gradient sync and copies to the host must not queue behind each other"
        return Setting(str(_MOST), why)
    return None


def doubt(want: Setting, environment: Mapping[str, str]) -> str | None:
    """What is to be said of the user's value: one line, or None if it is as good.

    Raises:
        ValueError: CUDA does not take it.
    """
    found = environment[VARIABLE]
    if not found.isdecimal() or not 1 <= int(found) <= _MOST:
        raise ValueError(
            f"{VARIABLE} is {found!r}, expected a number from 1 to {_MOST}: unset it, and "
            f"{want.value} is used"
        )
    if (int(found) == 1) == (want.value == "1"):
        return None
    return f"{VARIABLE}={found} is kept, {want.value} would be faster: {want.why}"


def values(run: Run) -> str:
    """For people: what a run sets, with and without tensor parallelism."""
    plain, parallel = (wanted(replace(run, tensor_parallel=one)) for one in (False, True))
    assert plain is not None and parallel is not None
    if parallel.value == plain.value:
        return f"{plain.value} with HDP"
    return f"{plain.value} with HDP, {parallel.value} with tensor parallelism"
