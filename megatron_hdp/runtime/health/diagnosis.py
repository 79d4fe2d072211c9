"""Who keeps a job from going on, told from what every rank last said about itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

_SHOWN = 8  # ranks that a message names


@dataclass(frozen=True)
class Status:
    """What a rank says about itself with every heartbeat; ages, because clocks differ."""

    host: str
    step: int
    """The step that runs, counted from 1; 0 before the first."""
    activity: str
    """What the main thread does, such as ``forward of micro-batch 3``."""
    call: str
    """The innermost Python function of the main thread and where it stands."""
    waits: bool
    """True if that is to wait for other ranks, or the device does, for which the thread stands."""
    still_s: float
    """Seconds since the main thread, or the device, last began or ended something."""
    beat: int = 0
    """Counts the heartbeats."""
    left: bool = False
    """True once the rank takes no further part."""
    device: str | None = None
    """What the device does of what the main thread launched; None if it has done all, or there is
    none, or nobody knows."""
    device_age_s: float = 0.0
    """For how long that is known."""
    is_free: bool = False
    """True between two calls of a session: it may take as long as it likes."""

    def to_json(self) -> str:
        """The status as the store keeps it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Status:
        """The inverse of `to_json`."""
        return cls(**json.loads(text))

    def doing(self) -> str:
        """Words for a message: ``in forward of micro-batch 3 of step 12``."""
        step = f" of step {self.step}" if self.step else ""
        return f"in {self.activity}{step} ({self.call}{self._device_words()})"

    def _device_words(self) -> str:
        if self.device is None:
            return ""
        return f"; its device in {self.device}, as {self.device_age_s:.0f} s ago"


@dataclass(frozen=True)
class Heard:
    """What is known of one rank."""

    status: Status | None
    """Its latest heartbeat; None if there was none."""
    silent_s: float
    """Seconds for which no newer one came."""


def missing_ranks(heard: Sequence[Heard], silence_s: float) -> str | None:
    """Names the ranks that have left or give no sign of life, or None.

    Args:
        heard: what is known of each rank, by rank.
        silence_s: a rank silent for this long has died or was stopped.
    """

    def gone(rank: int) -> bool:
        status, silent = heard[rank].status, heard[rank].silent_s >= silence_s
        return silent or (status is not None and status.left)

    def words(rank: int) -> str:
        status, silent_s = heard[rank].status, heard[rank].silent_s
        if status is None:
            return f"rank {rank} never gave a sign of life"
        if status.left:
            return f"{name_of(rank, status)} has left the job, last {status.doing()}"
        return (
            f"{name_of(rank, status)} died or was stopped: no sign of life for {silent_s:.0f} s, "
            f"last {status.doing()}"
        )

    return _list(list(filter(gone, range(len(heard)))), words)


def stalled_ranks(heard: Sequence[Heard], patience_s: float) -> str | None:
    """Names the living ranks for which the others wait, or None while they get on.

    Args:
        heard: what is known of each rank, by rank.
        patience_s: a rank that does not wait must have begun or ended something within this time.
            Where all wait, none must have: one that has is only between two things. 0 once nobody
            can wait any longer, not even for those that are free.
    """
    known = {rank: found.status for rank, found in enumerate(heard) if found.status is not None}
    busy = [rank for rank, status in known.items() if not status.waits]
    late = [rank for rank in busy if known[rank].still_s >= patience_s]
    stalled = [rank for rank in late if not patience_s or not known[rank].is_free]
    gets_on = any(status.still_s < patience_s for status in known.values())
    if not stalled and (busy or gets_on):
        return None

    def words(rank: int) -> str:
        status = known[rank]
        return f"{name_of(rank, status)} {status.doing()} for {status.still_s:.0f} s"

    if stalled:
        num_waiting = len(known) - len(busy)
        return f"stalled while {num_waiting} of {len(heard)} ranks wait: {_list(stalled, words)}"
    return f"all ranks wait for each other: {_list(sorted(known), words)}"


def name_of(rank: int, status: Status) -> str:
    """``rank 2 (host node7)``."""
    return f"rank {rank} (host {status.host})"


def _list(ranks: Sequence[int], words: Callable[[int], str]) -> str | None:
    if not ranks:
        return None
    more = f"; and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return "; ".join(words(rank) for rank in ranks[:_SHOWN]) + more
