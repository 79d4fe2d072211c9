"""Who may change a folder of checkpoints: one living process, which its newest record names.

    owner-7.json    host, process and job of the owner, and a count that it raises every second

A process becomes the owner by making the record of the next number (``O_EXCL``), so of several that
start at one moment one does, and only if the owner before is gone: on the same host its process has
ended, elsewhere its count has stood still, looked at again and again by the clock of who looks. A
record is never written by another process than its own, so one that was stopped, and goes on when
its record was superseded, finds that out and harms nothing.
"""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

_NAME = re.compile(r"owner-(\d+)\.json")
_COUNT = "%020d\n"
_TELL_S = 1.0
_LOOK_S = 0.25
_SILENCE_S = 20.0  # a file system that is busy with a checkpoint may be slow to show a count
_SAME_JOB_S = 40.0  # for the ranks of a restarted job to end; less than a collective may wait
_RELEASE_S = 5.0  # what a file system that hangs may cost at the end
_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


@dataclass(frozen=True)
class Process:
    """A process as others can tell it from all others."""

    host: str
    machine: str
    """Equal for processes that can see each other by their ids."""
    pid: int
    started: str
    """When; another process that gets this id later has started at another time."""
    job: str | None
    """The job, where its name is not another one's too."""
    word: str
    """Drawn for this record."""

    @classmethod
    def this(cls) -> Process:
        """The one that calls this."""
        boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
        namespace = os.readlink(_NAMESPACE) if _NAMESPACE.is_symlink() else ""
        host, pid = socket.gethostname(), os.getpid()
        job, word = _job(os.environ), secrets.token_hex(8)
        return cls(host, f"{host} {boot} {namespace}", pid, _started(pid) or "", job, word)

    @classmethod
    def in_record(cls, text: bytes) -> Process | None:
        """The one that made a record; None while it is being made, or if that was cut short."""
        try:
            return cls(**json.loads(text.splitlines()[0]))
        except (IndexError, ValueError, TypeError):
            return None

    def has_ended(self) -> bool:
        """Whether it has; only of a process of this machine."""
        return _started(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" ({self.job})" if self.job else "")


class Ownership:
    """The right to change a folder of checkpoints, until `release`.

    Args:
        folder: made if it is not there, and then removed by `release` if nothing was saved.
        say: prints one line, if this takes a while.
        silence_s: how long an owner on another host must stand still to count as gone.
        same_job_s: how long a living owner of the same job, which was started again, is waited for.

    Raises:
        ValueError: another process owns it.
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        say: Callable[[str], None] = lambda line: None,
        *,
        silence_s: float = _SILENCE_S,
        same_job_s: float = _SAME_JOB_S,
    ) -> None:
        self._folder = folder
        self._say = say
        self._silence_s = silence_s
        self._same_job_s = same_job_s
        self._me = Process.this()
        self._made = _make(folder)
        try:
            self._file, self._number = self._claim()
        except BaseException:
            _remove_empty(self._made)
            raise
        self._counts_at = os.fstat(self._file).st_size
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="checkpoint-owner", daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Returns if this process is still the owner; makes a folder anew that was removed.

        Raises:
            ValueError: another one has taken over, or the record alone was removed.
        """
        numbers = self._numbers()
        if not numbers and not any(self._folder.glob("iter_*")):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file, self._number = self._claim()  # the thread goes on in the new file
            return
        if numbers and numbers[-1] == self._number and self._is_mine():
            return
        newest = Process.in_record(_read(self._record(numbers[-1])) or b"") if numbers else None
        raise ValueError(
            f"{self._folder} does not belong to this job any more: found "
            f"{newest or 'no record of an owner'}, expected {self._me}. It was given up because "
            f"nothing was heard of this job for {self._silence_s:.0f} s (it was stopped, or its "
            "file system was): nothing more is saved. Keep one of the two jobs, or give each its "
            "own --save"
        )

    def release(self, last: Callable[[], None] = lambda: None) -> bool:
        """Gives the folder up; False if the file system does not answer in time.

        Args:
            last: what is still to be done in the folder.
        """
        self._last = last
        self._stop.set()
        self._thread.join(_RELEASE_S)
        return not self._thread.is_alive()

    def _claim(self) -> tuple[int, int]:
        """The open file and the number of this process's record."""
        while True:
            gone = self._await_the_end_of_the_owner()
            number = max(gone, default=0) + 1
            try:
                file = os.open(self._record(number), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                continue  # another one was faster: it is the owner now
            try:
                os.write(file, f"{json.dumps(asdict(self._me))}\n".encode())
                os.fsync(file)
                if set(self._numbers()) <= {*gone, number}:
                    for old in gone:
                        self._record(old).unlink(missing_ok=True)
                    return file, number
            except BaseException:
                self._record(number).unlink(missing_ok=True)
                os.close(file)
                raise
            # the owner before gave up just now, and another one begins to count at 1
            self._record(number).unlink(missing_ok=True)
            os.close(file)
            time.sleep(random.uniform(0.0, 2 * _LOOK_S))

    def _await_the_end_of_the_owner(self) -> list[int]:
        """The numbers of all records once the newest one's process is gone.

        Raises:
            ValueError: it lives.
        """
        began = time.monotonic()
        looked_at: tuple[int, bytes] | None = None
        is_told = False
        unchanged = 0  # looks; so a time in which this process or its file system stood counts not
        while True:
            numbers = self._numbers()
            text = _read(self._record(numbers[-1])) if numbers else None
            if not numbers:
                return []
            if text is None:  # it has just been removed
                time.sleep(_LOOK_S)
                continue
            owner = Process.in_record(text)
            if owner is not None and owner.machine == self._me.machine:
                if owner.has_ended():
                    return numbers
                lives = True
            else:
                lives = looked_at is not None and looked_at != (numbers[-1], text)
                unchanged = unchanged + 1 if looked_at == (numbers[-1], text) else 0
                looked_at = (numbers[-1], text)
                if unchanged * _LOOK_S >= self._silence_s:
                    return numbers
            if lives and not self._is_restarted(owner, began):
                raise ValueError(
                    f"{self._folder} belongs to another job that runs: {owner}. Two jobs would mix "
                    "their checkpoints: end that one first, or give another --save"
                )
            if not is_told:
                self._say(f"{self._folder}: waiting for the end of {owner or 'an unknown owner'}")
                is_told = True
            time.sleep(_LOOK_S)

    def _is_restarted(self, owner: Process | None, began: float) -> bool:
        """Whether the owner is of the job's attempt before this one, and may still end."""
        if owner is None:
            return True
        is_same = owner.job is not None and owner.job == self._me.job
        return is_same and time.monotonic() - began < self._same_job_s

    def _tell(self) -> None:
        """Raises the count until the folder is given up; then removes the record.

        What the file system refuses is tried again: who looks at the record counts it as silence.
        """
        count = 0
        while not self._stop.wait(_TELL_S):
            count += 1
            try:
                os.pwrite(self._file, (_COUNT % count).encode(), self._counts_at)
                os.fsync(self._file)
            except OSError:
                continue
        try:
            self._last()
        finally:
            if self._is_mine():
                self._record(self._number).unlink(missing_ok=True)
                _remove_empty(self._made)
            os.close(self._file)

    def _is_mine(self) -> bool:
        found = Process.in_record(_read(self._record(self._number)) or b"")
        return found == self._me

    def _numbers(self) -> list[int]:
        names = (_NAME.fullmatch(path.name) for path in self._folder.glob("owner-*.json"))
        return sorted(int(name[1]) for name in names if name)

    def _record(self, number: int) -> Path:
        return self._folder / f"owner-{number}.json"


def _job(environment: Mapping[str, str]) -> str | None:
    """The job of this process, the same one after a restart; None where that has no name."""
    if job := environment.get("SLURM_JOB_ID"):
        return f"Slurm job {job}"
    run = environment.get("TORCHELASTIC_RUN_ID", "none")
    return None if run == "none" else f"torchrun's run {run}"


def _started(pid: int) -> str | None:
    """When a process of this machine started; None if there is none, or it only waits to be reaped.

    On Linux in ticks since the boot, which no change of the clock moves.
    """
    if not Path("/proc/self/stat").exists():
        try:
            return repr(psutil.Process(pid).create_time())
        except psutil.NoSuchProcess:
            return None
    text = _read(Path(f"/proc/{pid}/stat"))
    if text is None:
        return None
    state, *fields = text[text.rindex(b")") + 2 :].split()
    return None if state in (b"Z", b"X") else fields[18].decode()


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _make(folder: Path) -> list[Path]:
    """Makes a folder; returns those that were not there, the innermost last."""
    missing = [path for path in (folder, *folder.parents) if not os.path.exists(path)][::-1]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        _remove_empty(missing)
        raise
    return missing


def _remove_empty(folders: list[Path]) -> None:
    for folder in reversed(folders):
        if os.path.isdir(folder):
            if any(folder.iterdir()):
                return
            folder.rmdir()
