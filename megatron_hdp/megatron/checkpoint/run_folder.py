"""The folder that a run saves into: its own, of no other job, and with no other run's checkpoints.

A run replaces a checkpoint only if it comes from the same folder: one that is later than the one
that it was resumed from, which ``--ckpt-step`` gave up, or of which a kill left the tracker behind.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from megatron_hdp.files import write_synced
from megatron_hdp.megatron.checkpoint.folder import MODEL_FILES, CheckpointFolder
from megatron_hdp.megatron.checkpoint.owner import Ownership

_ROOM_BYTES = 1 << 20


class RunFolder:
    """Checkpoints of one run by iteration; used on the first rank alone.

    Whatever changes the folder raises a ValueError if it belongs to another job by now, and an
    OSError if it cannot be written.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path = path
        self._say = say
        self._folder = CheckpointFolder(path, self._require_owned)
        self._owner: Ownership | None = None
        self._may_replace: set[int] = set()
        self._begun: Path | None = None

    def take(self) -> None:
        """Makes this process the folder's owner and removes what dead runs have left half-written.

        Raises:
            ValueError: a job that lives owns it.
        """
        self._owner = Ownership(self.path, self._say)
        self._folder.clear()
        self._folder.probe()

    def take_over(self, iteration: int) -> None:
        """`take`, from a process of the same job that is gone; goes back to an iteration.

        Raises:
            ValueError: a job that lives owns it.
        """
        if self._owner is None:
            self.take()
            self._may_replace = {one for one in self._folder.iterations() if one > iteration}

    def latest(self) -> int:
        """The iteration that was saved last; 0: none."""
        return max(self._folder.iterations(), default=0)

    def begin_at(self, source: Path | None) -> str | None:
        """Notes where the run begins, anew if `source` is None; returns words for the log.

        Raises:
            ValueError: the folder holds later checkpoints of another run, or a damaged tracker.
        """
        iteration = 0 if source is None else CheckpointFolder.iteration_of(source)
        later = [one for one in self._folder.iterations() if one > iteration]
        if source is not None and self.holds(source):
            self._may_replace = set(later)
            if not later:
                return None
            return (
                f"{self.path} holds later checkpoints ({', '.join(map(str, later))}): each is "
                f"replaced when this run, which resumes from {iteration}, saves that iteration"
            )
        if later:
            raise ValueError(
                f"--save {self.path} holds checkpoints that this run does not come from and would "
                f"replace (found iterations {', '.join(map(str, later))}, expected none above "
                f"{iteration}): add --load {self.path} to continue them (with --ckpt-step N: the "
                "one of iteration N), or give another --save"
            )
        self._folder.latest()
        return None

    def holds(self, source: Path) -> bool:
        """Whether a checkpoint lies in this folder."""
        return self.path.resolve() == source.parent.resolve()

    def take_along(self, source: Path) -> None:
        """Copies the files of the model that a loaded checkpoint began as, if it has them."""
        files, kept = source.parent / MODEL_FILES, self.path / MODEL_FILES
        if files.is_dir() and not kept.exists():
            shutil.copytree(files, kept)

    def begin(self, iteration: int) -> Path:
        """An empty folder to write into.

        Raises:
            ValueError: there is another run's checkpoint of this iteration.
        """
        self._require_free(iteration)
        self._begun = self._folder.begin(iteration)
        _require_room(self._begun)
        return self._begun

    def publish(self, written: Path, iteration: int) -> None:
        """Turns what `begin` gave into the latest checkpoint; raises as that does."""
        self._require_free(iteration)
        self._folder.publish(written, iteration)
        self._may_replace.discard(iteration)
        self._begun = None

    def discard(self) -> None:
        """Removes what is being written."""
        if self._begun is not None:
            self._folder.discard(self._begun)
            self._begun = None

    def give_up(self) -> None:
        """Ends the ownership; what is being written is removed."""
        if self._owner is not None and not self._owner.release(self.discard):
            self._say(f"{self.path}: the file system does not answer, this job's record stays")
        self._owner = None

    def _require_owned(self) -> None:
        assert self._owner is not None, "load() comes first: it takes the folder"
        self._owner.require()

    def _require_free(self, iteration: int) -> None:
        if iteration in self._folder.iterations() and iteration not in self._may_replace:
            raise ValueError(
                f"{self.path} holds a checkpoint of iteration {iteration} that this run has not "
                "saved and does not come from, expected none: it is kept and this one is not "
                "saved: give another --save, or continue that one with --load"
            )


def _require_room(folder: Path) -> None:
    """Meets a full disk before Megatron's first rank does, which writes while the others wait."""
    path = folder / "room"
    try:
        write_synced(path, bytes(_ROOM_BYTES))
    except OSError as error:
        raise ValueError(
            f"--save {folder.parent}: found {error.strerror}, expected room for a checkpoint: make "
            "room, or give another folder"
        ) from error
    path.unlink()
