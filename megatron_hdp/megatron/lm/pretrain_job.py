"""Heartbeats around Megatron-LM's ``pretrain()``, which end a job whose ranks fail."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_hdp.exit_codes import ExitCode, is_of_a_full_disk
from megatron_hdp.runtime.epochs import NotNamedError
from megatron_hdp.runtime.health import Heartbeat, RankFailure
from megatron_hdp.runtime.timeline import CHECKPOINT, OPTIMIZER, START, Timeline

_SHARE = 0.9  # of Megatron's time-out, so that heartbeats come before its communicators end


class PretrainJob:
    """One call of ``pretrain()`` in this process; a context manager around it.

    From `begin` on a rank that dies, fails or hangs ends the job: every other rank's process
    prints who is to blame and ends with `BLAMES_ANOTHER`.
    """

    def __init__(self) -> None:
        self.timeline = Timeline()
        self._stack = ExitStack()
        self._start = ExitStack()
        self._heartbeat: Heartbeat | None = None
        self._survives = False

    @property
    def heartbeat(self) -> Heartbeat | None:
        """Between `begin` and `leave`."""
        return self._heartbeat

    def begin(self, args: argparse.Namespace) -> None:
        """Starts the heartbeats, once torch.distributed is there; a second call does nothing."""
        if self._heartbeat is not None:
            return
        self._survives = args.hdp_survive
        slow_timeout_s = 60.0 * args.distributed_timeout_minutes * _SHARE
        self._heartbeat = self._stack.enter_context(
            Heartbeat.of_job(
                self.timeline,
                stall_timeout_s=args.stall_timeout_seconds or slow_timeout_s,
                slow_timeout_s=slow_timeout_s,
            )
        )
        self._start.enter_context(self.timeline.noted(START))

    def leave(self) -> None:
        """Ends the heartbeats of an epoch, unheard; `begin` starts those of another one."""
        self._start.close()
        if self._heartbeat is not None:
            self._heartbeat.abandon()
            self._stack.pop_all()
            self._heartbeat = None

    def begin_step(self, step: int) -> None:
        """Notes that a training step begins, counted from 1."""
        assert self._heartbeat is not None
        self._start.close()
        self._heartbeat.begin_step(step)

    def optimizer_step(self) -> AbstractContextManager[None]:
        """Around the optimizer's step."""
        return self.timeline.span(OPTIMIZER)

    def saving(self) -> AbstractContextManager[None]:
        """Around the saving of a checkpoint, which may take its time."""
        return self.timeline.noted(CHECKPOINT)

    def __enter__(self) -> PretrainJob:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        stack: TracebackType | None,
    ) -> None:
        if isinstance(error, SystemExit):  # Megatron's way of ending a run early, on all ranks
            kind = error = stack = None
        self._start.close()
        try:
            self._stack.__exit__(kind, error, stack)
            if isinstance(error, RankFailure | NotNamedError):
                raise error
            if self._survives and (reason := _of_storage(error)):
                raise RankFailure(
                    f"{reason}: the job ends; make room and start it again, it continues from the "
                    "checkpoint before"
                ) from error
        except (RankFailure, NotNamedError) as failure:
            sys.stdout.flush()
            rank = f" on rank {dist.get_rank()}" if dist.is_initialized() else ""
            print(f"megatron_hdp: error{rank}: {failure}", file=sys.stderr, flush=True)
            # Closing communicators would wait for the other ranks.
            os._exit(ExitCode.BLAMES_ANOTHER)


def _of_storage(error: BaseException | None) -> str:
    """Why something could not be written; empty for other errors."""
    if isinstance(error, CheckpointException) and error.args[0] != "read":
        # all ranks get it, the first one with the causes
        causes = "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items())
        return f"the checkpoint could not be saved ({causes or 'the first rank says why'})"
    return str(error) if error is not None and is_of_a_full_disk(error) else ""
