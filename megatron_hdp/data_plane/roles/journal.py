"""What the planner has decided, on disk before anybody hears of it; and which planner is the one.

A planner that starts takes the next *epoch*. From then on an earlier one that still lives, behind a
slow network for example, can neither write nor answer.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from megatron_hdp.files import sync, write_atomically

_EPOCH, _LOCK, _STEPS = "epoch", "lock", "steps.jsonl"
_KEPT = 64  # entries that are left when the journal is cut
_MOST_BYTES = 1 << 20


class FencedError(RuntimeError):
    """Another planner has taken over: this one must not answer any more."""


@dataclass(frozen=True)
class Entry:
    """One step that was decided."""

    split: str
    before: Mapping[str, Any]
    """Record of the position at which it begins."""
    after: Mapping[str, Any]
    """Of the one behind it."""
    fingerprints: Mapping[str, int]
    """Of its sequences and its plan."""
    failure: str | None
    """Why its plan is the static one instead of the strategy's."""
    without: Mapping[str, str] = field(default_factory=dict)
    """Sources that it was decided without, and why."""


class Journal:
    """The steps that planners of one job have decided, in a folder of this user alone.

    Attributes:
        epoch: of this planner, from 1.
    """

    def __init__(self, folder: Path) -> None:
        """Take over: whoever opened the journal before is fenced off.

        Raises:
            OSError: the folder cannot be written.
        """
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():
            self.epoch = self._current_epoch() + 1
            self._replace(_EPOCH, str(self.epoch).encode())

    def require_current(self) -> None:
        """Return if no other planner has taken over.

        Raises:
            FencedError: one has.
        """
        with self._locked():
            self._require_current()

    def append(self, entry: Entry) -> None:
        """Write an entry; it is on the disk when this returns.

        Raises:
            FencedError: another planner has taken over, nothing was written.
            ValueError: there is no room for it.
        """
        try:
            self._append(entry)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ValueError(
                f"{self._folder}: found no room for the data plane's journal ({error.strerror}), "
                "expected a few KB: make room there, or set TMPDIR to another folder"
            ) from None

    def _append(self, entry: Entry) -> None:
        line = orjson.dumps(entry.__dict__, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
        with self._locked():
            self._require_current()
            path = self._folder / _STEPS
            if path.exists() and path.stat().st_size > _MOST_BYTES:
                kept = [orjson.dumps(one.__dict__) for one in self._entries()[-_KEPT:]]
                self._replace(_STEPS, b"\n".join([*kept, line]))
                return
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                size = os.fstat(file).st_size
                if size and os.pread(file, 1, size - 1) != b"\n":
                    line = b"\n" + line  # a kill has cut the line before
                _write(file, line)
                os.fsync(file)
            finally:
                os.close(file)
            if not size:
                sync(self._folder)

    def entries(self) -> list[Entry]:
        """Return what was decided, oldest first; a line that was cut by a kill is left out."""
        with self._locked():
            return self._entries()

    def _entries(self) -> list[Entry]:
        try:
            data = (self._folder / _STEPS).read_bytes()
        except FileNotFoundError:
            return []
        found = []
        for line in data.split(b"\n"):
            try:
                found.append(Entry(**orjson.loads(line)))
            except (orjson.JSONDecodeError, TypeError):
                continue  # empty, or cut: nobody was told of it
        return found

    def _require_current(self) -> None:
        current = self._current_epoch()
        if current != self.epoch:
            raise FencedError(
                f"this planner is of epoch {self.epoch}, one of epoch {current} has taken over"
            )

    def _current_epoch(self) -> int:
        try:
            return int((self._folder / _EPOCH).read_text())
        except FileNotFoundError:
            return 0

    def _replace(self, name: str, data: bytes) -> None:
        write_atomically(self._folder / name, data, durable=True, mode=0o600)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        file = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
