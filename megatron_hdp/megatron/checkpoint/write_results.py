"""Hands what the writers of a checkpoint report to the rank that waits for them, through a file.

Megatron keeps a server process on every rank for that. It outlives a rank that is killed, and holds
the job's output open for ever. So, while Megatron's writer is set up, it is given this queue
instead of its own.
"""

from __future__ import annotations

import os
import pickle
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async


class ResultsFile:
    """A queue of at most one item between a process and those that it starts.

    Args:
        path: in a folder that exists; taken off the disk together with the item.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def put(self, item: Any) -> None:
        """Makes `item` visible as a whole."""
        temporary = self._path.with_name(self._path.name + ".tmp")
        temporary.write_bytes(pickle.dumps(item))
        os.replace(temporary, self._path)

    def get_nowait(self) -> Any:
        """Takes the item.

        Raises:
            queue.Empty: there is none.
        """
        if not self._path.exists():
            raise queue.Empty
        item = pickle.loads(self._path.read_bytes())
        self._path.unlink()
        return item


@contextmanager
def through(results: ResultsFile) -> Iterator[None]:
    """Within the block, a writer of Megatron's that is set up reports to `results`."""
    original = filesystem_async._results_queue  # None until Megatron starts its server
    filesystem_async._results_queue = results
    try:
        yield
    finally:
        filesystem_async._results_queue = original
