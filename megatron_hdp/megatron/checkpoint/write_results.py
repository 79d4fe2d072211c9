"""Hands what the writers of a checkpoint report to the rank that waits for them.

Megatron keeps a server process on every rank for that. It outlives a rank that is killed, and holds
the job's output open for ever. So, while Megatron's writer is set up, it is given this queue
instead of its own: a file that ends with the rank. It is not on the disk that the checkpoint goes
to, which may be full, and then that is what there is to report.
"""

from __future__ import annotations

import os
import pickle
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron_hdp.megatron.checkpoint.memory_file import MemoryFile

_COUNT_BYTES = 8


class ReportFile:
    """A queue of at most one item, from a process that this one starts, by fork or anew."""

    def __init__(self) -> None:
        self._memory = MemoryFile("hdp-checkpoint-report-")
        self._path = self._memory.path

    def __getstate__(self) -> str:
        return self._path

    def __setstate__(self, path: str) -> None:
        self._path = path

    def put(self, item: Any) -> None:
        """Makes `item` visible, as a whole; in the process that was started."""
        data = pickle.dumps(item)
        with open(self._path, "wb", buffering=0) as file:
            file.write(len(data).to_bytes(_COUNT_BYTES, "little") + data)

    def get_nowait(self) -> Any:
        """Takes the item.

        Raises:
            queue.Empty: there is none, or not all of it yet.
        """
        with open(self._memory.descriptor, "rb", closefd=False) as file:
            file.seek(0)
            count, data = file.read(_COUNT_BYTES), file.read()
        if len(count) < _COUNT_BYTES or len(data) < int.from_bytes(count, "little"):
            raise queue.Empty
        os.ftruncate(self._memory.descriptor, 0)
        return pickle.loads(data)


@contextmanager
def through_a_file() -> Iterator[None]:
    """Within the block, a writer of Megatron's that is set up reports through a file of its own."""
    original = filesystem_async._results_queue  # None until Megatron starts its server
    filesystem_async._results_queue = ReportFile()
    try:
        yield
    finally:
        filesystem_async._results_queue = original
