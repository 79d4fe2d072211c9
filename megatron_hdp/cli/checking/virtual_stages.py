"""Which number of virtual stages suits a pipeline best, of those that were planned and fit."""

from collections.abc import Sequence
from dataclasses import dataclass

NEAR = 0.005
"""Steps that differ by less count as equally fast: each part more costs messages and kernels that
planned times leave out."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One number of virtual stages on a rank, checked like the configuration's own."""

    virtual_stages: int
    layers: tuple[int, ...]
    """Of one virtual stage; several numbers where they differ, the fewest first."""
    needed_bytes: float
    """On a GPU of the fullest stage."""
    fits: bool
    efficiency: float | None
    """None, like the time, where the batch cannot be planned."""
    step_s: float | None


def best_of(tried: Sequence[Tried], own: int) -> int | None:
    """The virtual stages on a rank to take; None if none fits.

    Args:
        tried: each number that the layers allow.
        own: the configuration's, which is kept where it is as fast as the fastest.
    """
    times = {one.virtual_stages: one.step_s for one in tried if one.fits and one.step_s is not None}
    if not times:
        return None
    slowest_s = min(times.values()) * (1 + NEAR)
    near = [number for number, step_s in times.items() if step_s <= slowest_s]
    return own if own in near else min(near)
