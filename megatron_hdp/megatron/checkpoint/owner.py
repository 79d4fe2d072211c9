"""The one process that may change a folder of checkpoints: the newest record names it.

    owner-7.json    host, process and job of the owner, which renews the file's time every second

A process becomes the owner by creating the record of the next number (``O_EXCL``), so one of
several that start at the same moment does, and only if the owner before is dead: its process has
ended on this machine, or its record's time stood still for 20 s. An owner that lives that long is
an error. No process writes another one's record, so an owner that was suspended, and superseded
meanwhile, finds out before it next changes the folder.

Times are compared with each other, never with a clock, so clocks of hosts may differ. On NFS a
record is opened to be looked at, which asks the server; that creates exclusively since NFSv3. What
is not promised: to exclude an owner that the file system cuts off for 20 s between its last look
and the rename that follows.
"""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from time import sleep

import psutil

_NAME = re.compile(r"owner-(\d+)\.json")
_BEAT_S = 1.0
_LOOK_S = 0.25
_SILENCE_S = 20.0  # a file system that is busy with a checkpoint may be slow to show a new time
_RELEASE_S = 5.0  # what a file system that hangs may cost at the end
_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


class Ownership:
    """The right to change a folder of checkpoints, until `release`.

    Args:
        folder: made if it is missing, and then removed by `release` if nothing was saved.
        say: prints one line, if this takes a while.

    Raises:
        ValueError: another process owns it.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, say: Callable[[str], None] = lambda line: None) -> None:
        self._folder = folder
        self._say = say
        self._me = _this_process()
        self._made = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file, self._record = self._claim()
        except BaseException:
            self._remove_empty()
            raise
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="checkpoint-owner", daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Returns if this process is still the owner; makes a folder again that was removed.

        Raises:
            ValueError: another process has taken over, or the record alone was removed.
        """
        records = self._records()
        if not records and not any(self._folder.glob("iter_*")):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file, self._record = self._claim()
            return
        found = _look(records[-1])[1] if records else b""
        if found != self._me:
            raise ValueError(
                f"{self._folder} does not belong to this job any more: found {_name(found)}, "
                f"expected {_name(self._me)}. It was taken over because this job's record stood "
                f"still for {_SILENCE_S:.0f} s (the job or its file system was suspended): nothing "
                "more is saved. Keep one of the two jobs, or give each its own --save"
            )

    def release(self, last: Callable[[], None] = lambda: None) -> bool:
        """Gives the folder up after a last action; False if the file system does not answer."""
        self._last = last
        self._stop.set()
        self._thread.join(_RELEASE_S)
        return not self._thread.is_alive()

    def _claim(self) -> tuple[int, Path]:
        """The open record of this process and its path."""
        while True:
            dead = self._dead_records()
            record = self._folder / f"owner-{max(map(_number, dead), default=0) + 1}.json"
            try:
                file = os.open(record, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                continue  # another process was faster
            try:
                os.write(file, self._me)
                os.fsync(file)
                others = [path for path in self._records() if path != record]
                # by content: another process may have followed the dead one, released the folder,
                # and a third one have begun at its number
                if all(_look(path)[1] == dead.get(path) for path in others):
                    for path in dead:
                        path.unlink(missing_ok=True)
                    return file, record
            except BaseException:
                record.unlink(missing_ok=True)
                os.close(file)
                raise
            # the owner before released the folder just now, and another process began at 1
            record.unlink(missing_ok=True)
            os.close(file)
            sleep(random.uniform(0.0, 2 * _LOOK_S))

    def _dead_records(self) -> dict[Path, bytes]:
        """All records and what they hold, once the newest one's process is dead.

        Raises:
            ValueError: it lives.
        """
        seen, looks, unchanged = None, 0, 0  # counted, so that no time counts in which this stood
        while records := self._records():
            held = {path: _look(path)[1] for path in records[:-1]}
            found = _look(records[-1])
            held[records[-1]] = found[1]
            if _has_ended(found[1]):
                break
            looks += 1
            unchanged = unchanged + 1 if found == seen else 0
            if unchanged * _LOOK_S >= _SILENCE_S:
                break
            if found != seen and looks * _LOOK_S >= _SILENCE_S:
                raise ValueError(
                    f"{self._folder} belongs to another job that runs: {_name(found[1])}. Two jobs "
                    "would mix their checkpoints: end that one first, or give another --save"
                )
            if looks == 2:
                self._say(f"{self._folder}: waiting for the end of {_name(found[1])}")
            seen = found
            sleep(_LOOK_S)
        return held if records else {}

    def _beat(self) -> None:
        """Renews the record's time until the folder is given up; then removes the record."""
        while not self._stop.wait(_BEAT_S):
            try:
                os.utime(self._file)
            except OSError:
                continue  # another process that looks counts it as silence
        try:
            self._last()
        finally:
            if _look(self._record)[1] == self._me:
                self._record.unlink(missing_ok=True)
                self._remove_empty()
            os.close(self._file)

    def _records(self) -> list[Path]:
        found = [path for path in self._folder.glob("owner-*.json") if _NAME.fullmatch(path.name)]
        return sorted(found, key=_number)

    def _remove_empty(self) -> None:
        """Removes the folders that this process has made, unless something is in them."""
        for folder in self._made:
            if os.path.isdir(folder):
                if any(folder.iterdir()):
                    return
                folder.rmdir()


def _machine() -> str:
    """Equal for processes that see each other by their ids."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return f"{socket.gethostname()} {boot} {os.readlink(_NAMESPACE) if boot else ''}"


def _this_process() -> bytes:
    """The content of its record, which a random word makes its own."""
    job, run = os.environ.get("SLURM_JOB_ID"), os.environ.get("TORCHELASTIC_RUN_ID", "none")
    shown = f" (Slurm job {job})" if job else "" if run == "none" else f" (torchrun's run {run})"
    name = f"process {os.getpid()} on {socket.gethostname()}{shown}"
    return json.dumps([name, os.getpid(), _machine(), secrets.token_hex(8)]).encode()


def _name(record: bytes) -> str:
    try:
        return str(json.loads(record)[0])
    except (ValueError, LookupError):  # it is being written, or was cut short
        return "an unknown owner" if record else "no record of an owner"


def _has_ended(record: bytes) -> bool:
    """Whether the record's process ran on this machine and has ended."""
    try:
        _, pid, machine, _ = json.loads(record)
    except ValueError:
        return False
    if machine != _machine():
        return False
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _number(record: Path) -> int:
    name = _NAME.fullmatch(record.name)
    assert name is not None, record
    return int(name[1])


def _look(record: Path) -> tuple[int, bytes]:
    """Time and content of a record, as the file system's server has them; 0 if there is none."""
    try:
        with record.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns, file.read()
    except FileNotFoundError:
        return 0, b""
