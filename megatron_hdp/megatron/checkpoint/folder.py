"""The folder of a run's checkpoints: one appears when it is whole, whenever the run is killed.

    iter_0000010/                       a whole checkpoint
    latest_checkpointed_iteration.txt   which one is the latest, Megatron's name
    iter_0000020.partial-9f31c2e0/      being written, or left behind by a kill
    iter_0000010.replaced/              the whole one that a new iter_0000010 is about to replace

Every change of what a reader sees is one rename. Only one rank may change the folder.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"


class CheckpointFolder:
    """Checkpoints by iteration.

    Args:
        path: made when the first checkpoint is begun.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def latest(self) -> int | None:
        """The iteration that the tracker names; None where there is no tracker yet.

        Raises:
            ValueError: the tracker holds no iteration.
        """
        tracker = self.path / TRACKER
        if not tracker.exists():
            return None
        text = tracker.read_text().strip()
        if not text.isdecimal():
            raise ValueError(
                f"{tracker}: found {text!r}, expected the number of an iteration: write the one "
                f"to load ({self._held()})"
            )
        return int(text)

    def find(self, iteration: int) -> Path:
        """The whole checkpoint of an iteration.

        Raises:
            ValueError: there is none; names those that are there.
        """
        whole = self._named(iteration)
        for place in (whole, _replaced(whole)):  # the second: killed between two renames
            if place.is_dir():
                return place
        raise ValueError(
            f"{self.path} does not hold the checkpoint {whole.name}: put it back, or choose "
            f"another with --ckpt-step ({self._held()})"
        )

    def begin(self, iteration: int) -> Path:
        """An empty folder to write into, under a name that no reader and no earlier run looks at.

        What kills have left behind is removed. The name is new each time, because writers of a
        killed run may live on for a while.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for leftover in self.path.glob("*.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)  # such a writer may add a file meanwhile
        partial = _partial(self._named(iteration))
        partial.mkdir()
        return partial

    def publish(self, partial: Path, iteration: int) -> None:
        """Turns what `begin` gave into the latest checkpoint; on disk when this returns."""
        whole = self._named(iteration)
        replaced = _replaced(whole)
        _sync_to_disk(partial)
        if whole.exists():
            _remove(replaced)
            os.replace(whole, replaced)
        os.replace(partial, whole)
        self._write_tracker(iteration)
        _remove(replaced)

    def _write_tracker(self, iteration: int) -> None:
        tracker = self.path / TRACKER
        temporary = tracker.with_name(tracker.name + ".tmp")
        with temporary.open("w") as file:
            file.write(str(iteration))
            file.flush()
            os.fsync(file.fileno())
        _sync_entries(self.path)  # the checkpoint is on disk before the tracker names it
        os.replace(temporary, tracker)
        _sync_entries(self.path)

    def _named(self, iteration: int) -> Path:
        return self.path / f"iter_{iteration:07d}"

    def _held(self) -> str:
        names = sorted(path.name for path in self.path.glob("iter_*") if path.suffix == "")
        return f"it holds {', '.join(names)}" if names else "it holds none"


def _partial(whole: Path) -> Path:
    return whole.with_name(f"{whole.name}.partial-{secrets.token_hex(4)}")


def _replaced(whole: Path) -> Path:
    return whole.with_name(whole.name + ".replaced")


def _remove(folder: Path) -> None:
    """Removes a whole checkpoint; readers never see a part of it."""
    if folder.exists():
        doomed = _partial(folder)
        os.replace(folder, doomed)
        shutil.rmtree(doomed)


def _sync_to_disk(folder: Path) -> None:
    """Forces a folder to the disk; the library has done it for the files of tensors."""
    for path in folder.iterdir():
        if path.suffix != ".distcp":
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_entries(folder)


def _sync_entries(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
