"""From the start of all ranks to the last one's end: warnings passed on, failures bounded."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_hdp.exit_codes import ExitCode


class Fleet(Protocol):
    """All ranks of a job."""

    def codes(self) -> list[int | None]:
        """Exit codes by rank, -N for signal N; None while a rank runs."""

    def warn(self) -> None:
        """Asks all ranks that run to save and end."""

    def kill(self) -> None:
        """Ends all ranks that run."""


@dataclass(frozen=True)
class Ended:
    """How the ranks ended."""

    codes: tuple[int, ...]
    stopped: frozenset[int]
    """Ranks that were still running when their time was over, and were killed for that."""

    @property
    def failed(self) -> dict[int, int]:
        """Exit codes of the ranks that failed by themselves, by rank."""
        return {r: code for r, code in enumerate(self.codes) if code and r not in self.stopped}

    def exit_code(self) -> int:
        """That of the rank to blame, 128 + N for signal N; 0 if all ranks ended with 0.

        A mistake of the user's (2) goes before a rank that raised (1), that before one that was
        killed, and that before those that blame another (3).
        """
        codes = list(self.failed.values())
        if not codes:
            return ExitCode.DONE
        first, last = (ExitCode.MISTAKE, ExitCode.FAILED), (ExitCode.BLAMES_ANOTHER,)
        others = [code for code in codes if code not in first + last]
        code = next(c for c in (*first, *others, *last) if c in codes)
        return 128 - code if code < 0 else code


def watch(
    fleet: Fleet, is_warned: Callable[[], bool], *, grace_s: float, poll_s: float = 1.0
) -> Ended:
    """Waits for all ranks.

    Args:
        fleet: the started ranks.
        is_warned: whether the job shall save and end; ranks are told at every look from then on,
            as they listen only once they train.
        grace_s: how long ranks may go on after one has failed, to say whom they blame.
        poll_s: between two looks.
    """
    deadline = None
    stopped: frozenset[int] = frozenset()
    while True:
        codes = fleet.codes()
        ended = tuple(code for code in codes if code is not None)
        if len(ended) == len(codes):
            return Ended(ended, stopped)
        if any(ended) and deadline is None:
            deadline = time.monotonic() + grace_s
        if deadline is not None and time.monotonic() > deadline:
            stopped |= {rank for rank, code in enumerate(codes) if code is None}
            fleet.kill()
        elif is_warned():
            fleet.warn()
        time.sleep(poll_s)


def report(ended: Ended, hosts: Sequence[str], ranks_per_node: int) -> str:
    """One line a rank that failed or was stopped, in the words of torchrun's report."""
    lines = []
    for rank, code in enumerate(ended.codes):
        where = f"rank {rank} (node {rank // ranks_per_node}, {hosts[rank // ranks_per_node]})"
        if rank in ended.stopped:
            lines.append(f"{where}: stopped, another rank had failed")
        elif code:
            name = f" ({signal.Signals(-code).name})" if code < 0 else ""
            lines.append(f"{where}: exitcode : {code}{name}")
    return "\n".join(lines)
