"""Hands what the writers of a checkpoint report to the rank that waits for them, through a file.

Megatron keeps a server process on every rank for that. It outlives a rank that is killed, and holds
the job's output open for ever. So, while Megatron's writer is set up, it is given this queue
instead of its own. The file lies in the host's folder for temporary files: the disk that the
checkpoint goes to may be full, which is then what there is to report.
"""

from __future__ import annotations

import os
import pickle
import queue
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async


class ResultsFile:
    """A queue of at most one item between a process and those that it starts.

    The file is taken off the disk together with the item.
    """

    def __init__(self) -> None:
        name = f"hdp-checkpoint-report-{uuid.uuid4().hex}"
        self._path = Path(tempfile.gettempdir(), name)

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
def through_a_file() -> Iterator[None]:
    """Within the block, a writer of Megatron's that is set up reports through a file of its own."""
    original = filesystem_async._results_queue  # None until Megatron starts its server
    filesystem_async._results_queue = ResultsFile()
    try:
        yield
    finally:
        filesystem_async._results_queue = original
