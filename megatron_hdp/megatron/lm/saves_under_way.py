"""Asynchronous saves of Megatron-LM's loop when ranks are lost or join: given up, and made again.

Megatron's queue of saves waits for all ranks, and what it calls when all have written holds their
groups. So a rank that leaves an epoch ends its writer and takes another queue. A save that the
tracker does not name is owed: the folder goes, and the state that all are in then is saved.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_hdp.megatron.checkpoint.together import on_first_rank
from megatron_hdp.megatron.parallel import say
from megatron_hdp.runtime.gathering import gathered

_QUEUES = ("queue", "preload_q", "_persistent_queue", "_persistent_preload_q")
"""What a writer is handed work by, in any release."""


class SavesUnderWay:
    """The asynchronous saves of one process.

    Args:
        args: Megatron's.

    Attributes:
        is_owed: whether a save was given up that no later one has made good; on all ranks alike.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._begun: list[int] = []
        self.is_owed = False

    def begin(self, iteration: int) -> None:
        """Notes that the state behind an iteration is being saved, after this call."""
        self._begun.append(iteration)
        self.is_owed = False

    def leave(self) -> None:
        """Leaves an epoch: ends this rank's writer, if there is one. Communicates nothing."""
        from megatron.training import async_utils

        queue = async_utils._async_calls_queue
        if queue is None:
            return
        if not queue.async_calls:  # an idle writer knows nobody
            queue.call_idx = -1  # as those who join count saves
            return
        callers = {id(call.async_caller): call.async_caller for call in queue.async_calls}
        writers = [caller.process for caller in callers.values() if caller.process is not None]
        for caller in callers.values():
            for name in _QUEUES:  # nobody reads what is left in them
                if (waiting := getattr(caller, name, None)) is not None:
                    waiting.cancel_join_thread()
            caller.close(abort=True)
        queue.close(abort=True)
        for writer in writers:
            writer.join()
        async_utils._async_calls_queue = type(queue)(persistent=queue.persistent)

    def enter(self) -> None:
        """Continues in another epoch; every rank must call this.

        Raises:
            ValueError: the folder cannot be written.
        """
        if not self._args.async_save:
            return
        words: Sequence[tuple[list[int], bool]] = gathered((self._begun, self.is_owed))
        begun = sorted({one for its, _ in words for one in its})
        self._begun = []
        given_up = on_first_rank(lambda: self._discard(begun)) if begun else []
        self.is_owed = bool(given_up) or any(is_owed for _, is_owed in words)
        for iteration in given_up:
            say(f"the save of iteration {iteration} is given up: the next state is saved instead")

    def _discard(self, begun: list[int]) -> list[int]:
        """Removes those that never became whole; returns them."""
        from megatron.training import checkpointing

        save: Any = self._args.save
        tracker = Path(checkpointing.get_checkpoint_tracker_filename(save))
        text = tracker.read_text().strip() if tracker.exists() else ""
        latest = int(text) if text.isdecimal() else 0
        given_up = [one for one in begun if one > latest]
        for iteration in given_up:
            path = checkpointing.get_checkpoint_name(save, iteration, return_base_dir=True)
            if Path(path).exists():
                shutil.rmtree(path)
        return given_up
