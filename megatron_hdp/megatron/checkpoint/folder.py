"""The folder of a run's checkpoints: one appears when it is whole, whenever the run is killed.

    iter_0000010/                       a whole checkpoint
    release/                            weights that no run has saved, such as converted ones
    latest_checkpointed_iteration.txt   which one is the latest, Megatron's name
    iter_0000020.partial-9f31c2e0/      being written, or left behind by a kill
    iter_0000010.replaced/              the whole one that a new iter_0000010 is about to replace
    latest_checkpointed_iteration.txt.tmp       what the tracker is about to become

Every change of what a reader sees is one rename. Only one rank may change the folder, of the run
that owns it (`owner`).
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from megatron_hdp.files import sync, write_synced

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""What the tracker says, and the checkpoint is called, where the weights are no run's: Megatron's
word."""

MODEL_FILES = "hugging_face"
"""Folder beside checkpoints: configuration and tokenizer of the model that the weights began as."""

_NAME = re.compile(r"iter_(\d{7,})(?:\.replaced)?")
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)


class CheckpointFolder:
    """Checkpoints by iteration; the folder is made when the first one is begun.

    Before anything in it changes, `require_owned` is called, which raises if this run may not.
    """

    def __init__(self, path: Path, require_owned: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self._require_owned = require_owned

    @staticmethod
    def iteration_of(place: Path) -> int:
        """The iteration of a checkpoint that `find` or `release` gave; 0 before the first."""
        if place.name == RELEASE:
            return 0
        name = _NAME.fullmatch(place.name)
        assert name is not None, place
        return int(name[1])

    def iterations(self) -> list[int]:
        """Those that have a whole checkpoint, in ascending order."""
        found = (_NAME.fullmatch(path.name) for path in self.path.glob("iter_*"))
        return sorted({int(name[1]) for name in found if name})

    def release(self) -> Path | None:
        """The checkpoint that no run has saved, if the tracker names it.

        Raises:
            ValueError: it is not there.
        """
        if _text_of(self.path / TRACKER) != RELEASE:
            return None
        if not (self.path / RELEASE).is_dir():
            raise ValueError(
                f"{self.path} does not hold the folder {RELEASE} that its tracker names: put it "
                f"back, or convert the weights again ({self._held()})"
            )
        return self.path / RELEASE

    def latest(self) -> int | None:
        """The iteration that the tracker names; None where no run has saved yet.

        Raises:
            ValueError: the tracker holds no iteration, or is gone while checkpoints are there.
        """
        tracker, next_one = self.path / TRACKER, self.path / _next(TRACKER)
        held = self.iterations()  # first: a first save that ends after this is no lost tracker
        for path in (tracker, next_one, tracker):  # the last: a writer renamed the second meanwhile
            text = _text_of(path)
            if path == tracker and text == RELEASE:
                return None
            if path == next_one and text is not None:  # a kill before the tracker was there
                if _NUMBER.fullmatch(text) and int(text) in self.iterations():
                    return int(text)
            elif text is not None:
                return self._iteration_in(tracker, text)
        if not held:
            return None
        raise ValueError(
            f"{tracker}: found no such file, expected one that names the latest checkpoint "
            f"({self._held()}): add --ckpt-step {held[-1]}, or write that number into the file"
        )

    def newest(self) -> Path | None:
        """The checkpoint that the tracker names; None where there is none yet: see `latest`."""
        if release := self.release():
            return release
        iteration = self.latest()
        return None if iteration is None else self.find(iteration)

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

        The name is new each time, because writers of a killed run may live on for a while.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.clear()
        partial = _partial(self._named(iteration))
        partial.mkdir()
        return partial

    def probe(self) -> None:
        """Makes and removes a file of as long a name as any here.

        Raises:
            OSError: that is not possible here.
        """
        partial = _partial(self._named(0))
        partial.mkdir()
        (partial / _next(TRACKER)).touch()
        _remove(partial)

    def clear(self) -> None:
        """Removes what kills have left behind, and puts back what was about to be replaced."""
        self._require_owned()
        for leftover in self.path.glob("*.partial-*"):
            _remove(leftover)
        for replaced in self.path.glob("iter_*.replaced"):
            if replaced.with_suffix("").exists():
                _remove(replaced)
            else:
                os.replace(replaced, replaced.with_suffix(""))

    def discard(self, partial: Path) -> None:
        """Removes what `begin` gave, unless it is published."""
        _remove(partial)

    def publish(self, partial: Path, iteration: int) -> None:
        """Turns what `begin` gave into the latest checkpoint; on disk when this returns."""
        whole, tracker = self._named(iteration), self.path / TRACKER
        replaced, next_one = _replaced(whole), self.path / _next(TRACKER)
        _sync_to_disk(partial)
        write_synced(next_one, str(iteration).encode())
        self._require_owned()
        if whole.exists():
            _remove(replaced)
            os.replace(whole, replaced)
        os.replace(partial, whole)
        sync(self.path)  # the checkpoint is on disk before the tracker names it
        self._require_owned()
        os.replace(next_one, tracker)
        sync(self.path)
        _remove(replaced)

    def _named(self, iteration: int) -> Path:
        return self.path / f"iter_{iteration:07d}"

    def _iteration_in(self, tracker: Path, text: str) -> int:
        if not _NUMBER.fullmatch(text):
            raise ValueError(
                f"{tracker}: found {text[:60]!r}, expected the number of an iteration: write the "
                f"one to load, or give --ckpt-step ({self._held()})"
            )
        return int(text)

    def _held(self) -> str:
        names = [self._named(iteration).name for iteration in self.iterations()]
        return f"it holds {', '.join(names)}" if names else "it holds none"


def _text_of(path: Path) -> str | None:
    """What a small file holds, bytes that are no text included; None if there is no such file."""
    try:
        return path.read_bytes().decode(errors="replace").strip()
    except FileNotFoundError:
        return None


def _next(name: str) -> str:
    return f"{name}.tmp"


def _partial(whole: Path) -> Path:
    return whole.with_name(f"{whole.name}.partial-{secrets.token_hex(4)}")


def _replaced(whole: Path) -> Path:
    return whole.with_name(whole.name + ".replaced")


def _remove(folder: Path) -> None:
    """Removes a folder of the run; neither readers nor writers that still live see a part of it."""
    doomed = folder.with_name(f"{folder.name.split('.')[0]}.partial-{secrets.token_hex(4)}")
    try:
        os.replace(folder, doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed, ignore_errors=True)  # a writer with an open file may be in the way


def _sync_to_disk(folder: Path) -> None:
    """Forces a folder to the disk; the library has done it for the files of tensors."""
    for path in folder.iterdir():
        if path.suffix != ".distcp":
            sync(path)
    sync(folder)
