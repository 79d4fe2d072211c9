"""Whether ranks may have to wait for each other for longer than their communicators do."""

from __future__ import annotations

from megatron_hdp.megatron.parallel import say

_SHARE = 0.5  # a rank's host is ahead of its GPU, so its messages wait from before the step began


class Patience:
    """Tells of steps that take so long that a wait inside of them may be taken for a hang.

    A rank that has nothing to do waits in a ring, or in gradient sync, for most of a step. NCCL
    ends the job once a message has waited for longer than its communicator's timeout.

    Args:
        timeout_minutes: ``--distributed-timeout-minutes``.
    """

    def __init__(self, timeout_minutes: int) -> None:
        self._timeout_s = 60.0 * timeout_minutes
        self._told = False

    def check(self, step_s: float, how: str) -> None:
        """Says once that a step is too long, and what to do.

        Args:
            step_s: seconds of a step until gradient sync.
            how: who says so: "is planned to take" or "took".
        """
        if self._told or step_s <= _SHARE * self._timeout_s:
            return
        self._told = True
        enough = -(-step_s // (60 * _SHARE)) + 1
        say(
            f"warning: a step {how} {step_s:,.0f} s, and a rank may have to wait for most of it; "
            f"found --distributed-timeout-minutes {self._timeout_s / 60:.0f}, expected at least "
            f"{enough:.0f}: ranks that wait longer are taken for hung, and the job ends"
        )
