"""A file is whole or not there, durable where that is declared; one process holds a lock."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from megatron_hdp import files
from megatron_hdp.files import (
    is_named,
    locked,
    new_file,
    note_opened,
    sync,
    write_atomically,
    write_synced,
)

REPOSITORY = Path(__file__).parents[1]
KILLED = """
import os, signal, sys
from megatron_hdp import files
name, path = sys.argv[1:]
def kill(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(files.os, name, kill)
files.write_atomically(path, b"new", durable=True)
"""


def names(folder):
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("before", [None, b"old"])
def test_a_file_appears_whole(tmp_path, before):
    path = tmp_path / "a"
    if before:
        path.write_bytes(before)
    with new_file(path, durable=False) as temporary:
        Path(temporary).write_bytes(b"whole")
        assert not before or path.read_bytes() == before
        assert path.exists() == bool(before)
    assert names(tmp_path) == ["a"] and path.read_bytes() == b"whole"


def test_a_failure_keeps_the_old_file(tmp_path):
    write_atomically(tmp_path / "a", b"old", durable=False)
    with pytest.raises(OSError, match="full"), new_file(tmp_path / "a", durable=True) as temporary:
        Path(temporary).write_text("ha")
        raise OSError("disk full")
    assert names(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "old"


@pytest.mark.parametrize("durable", [False, True])
def test_the_file_behind_a_link_takes_the_content(tmp_path, durable):
    (tmp_path / "far").mkdir()
    for name in ("first", "second"):
        (tmp_path / name).symlink_to(Path("far") / name)
    (tmp_path / "far" / "first").write_bytes(b"old")  # the second leads to no file yet
    for name in ("first", "second"):
        write_atomically(tmp_path / name, b"new", durable=durable)
        assert (tmp_path / name).is_symlink() and (tmp_path / "far" / name).read_bytes() == b"new"
    assert names(tmp_path / "far") == ["first", "second"]
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="loop"):
        write_atomically(tmp_path / "loop", b"new", durable=durable)
    assert (tmp_path / "loop").is_symlink()


@pytest.mark.parametrize("durable", [False, True])
def test_what_is_no_file_is_written_through(tmp_path, durable):
    """A pipe, which stands for devices: a test that failed would replace one of the machine's."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (pipe, tmp_path / "link"):
        write_atomically(path, b"new", durable=durable)
        assert os.read(reader, 10) == b"new" and pipe.is_fifo()
    os.close(reader)
    assert names(tmp_path) == ["link", "pipe"]


@pytest.mark.parametrize("called", ["fsync", "replace"])
def test_a_kill_leaves_the_old_file(tmp_path, called):
    """Between the write and the rename; what is left has a name by which it can be found."""
    path = tmp_path / "a"
    path.write_bytes(b"old")
    command = [sys.executable, "-c", KILLED, called, str(path)]
    assert subprocess.run(command, cwd=REPOSITORY, check=False).returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    (left,) = tmp_path.glob("*.tmp[0-9]*")
    assert left.read_bytes() == b"new"
    write_atomically(path, b"newer", durable=True)
    assert path.read_bytes() == b"newer"


@pytest.mark.parametrize("durable", [False, True])
def test_what_is_durable_is_on_the_disk_before_and_after_its_name(tmp_path, monkeypatch, durable):
    """A crash of the machine cannot be had in a test: the order of the calls stands for it."""
    seen, real_sync, replace = [], os.fsync, os.replace

    def note_sync(file):
        seen.append(f"sync {os.path.basename(os.readlink(f'/proc/self/fd/{file}'))}")
        real_sync(file)

    def note_replace(source, target):
        seen.append(f"replace {Path(target).read_bytes().decode()}")
        replace(source, target)

    (tmp_path / "a").write_bytes(b"old")
    monkeypatch.setattr(files.os, "fsync", note_sync)
    monkeypatch.setattr(files.os, "replace", note_replace)
    write_atomically(tmp_path / "a", b"new", durable=durable)
    temporary = f"sync a.tmp{os.getpid()}"
    expected = [temporary, "replace old", f"sync {tmp_path.name}"] if durable else ["replace old"]
    assert seen == expected


def test_a_mode(tmp_path):
    write_atomically(tmp_path / "a", b"mine", durable=False, mode=0o600)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_in_place(tmp_path, monkeypatch):
    synced, real = [], os.fsync
    monkeypatch.setattr(files.os, "fsync", lambda file: (synced.append(file), real(file)))
    write_synced(tmp_path / "a", b"text")
    sync(tmp_path / "a")
    sync(tmp_path)
    assert (tmp_path / "a").read_bytes() == b"text" and len(synced) == 3


def test_the_time_of_access_is_set_and_no_other(tmp_path):
    path = tmp_path / "file"
    path.touch()
    os.utime(path, (1000, 2000))
    assert note_opened(path)
    assert path.stat().st_atime > 3000 and path.stat().st_mtime == 2000
    os.utime(path, (1000, 2000))
    with path.open("rb") as file:
        assert note_opened(file.fileno()) and path.stat().st_atime > 3000
    assert not note_opened(tmp_path / "missing")


class Clock:
    """Time that passes only while somebody sleeps."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(files, "time", found)
    return found


def test_who_waits_says_so_and_gives_up(tmp_path, clock):
    path, said = tmp_path / "x.lock", []
    with locked(path, "source web", said.append, patience_s=600.0) as note:
        assert said == []
        note("40% written")
        holder = rf"process {os.getpid()} on \S+, 40% written"
        refused = pytest.raises(TimeoutError, match=f"x.lock locked by {holder}, .* for 600 s")
        with refused, locked(path, "source web", said.append, patience_s=600.0):
            pytest.fail("two hold it")
        assert 600 <= clock.now < 602
        assert len(said) == 10  # after 3 s, and once a minute
        assert all(re.fullmatch(f"source web: waiting for {holder}, which .*", one) for one in said)
        with pytest.raises(TimeoutError), locked(path, "it", said.append, patience_s=0.0):
            pytest.fail("two hold it")
    with locked(path, "source web", said.append, patience_s=0.0):
        assert len(said) == 10


def test_a_holder_that_makes_progress_is_waited_for(tmp_path, clock, monkeypatch):
    path = tmp_path / "x.lock"
    with ExitStack() as stack:
        note = stack.enter_context(locked(path, "it", print, patience_s=600.0))

        def sleep(seconds):
            Clock.sleep(clock, 100.0)
            note(f"at {clock.now} s")
            if clock.now > 2000:
                stack.close()

        monkeypatch.setattr(clock, "sleep", sleep)
        with locked(path, "it", lambda line: None, patience_s=600.0):
            assert clock.now > 2000


@pytest.mark.parametrize("faulty", [False, True])
def test_a_lock_whose_file_is_removed_is_not_relied_on(tmp_path, monkeypatch, faulty):
    """Without looking at its name again two processes would make the same thing."""
    path, was_named, is_waiting = tmp_path / "x.lock", [], threading.Event()
    if faulty:
        monkeypatch.setattr(files, "is_named", lambda file, path: True)
    monkeypatch.setattr(files, "SAY_AFTER_S", 0.0)

    def wait():
        with locked(path, "it", lambda line: is_waiting.set(), patience_s=60.0):
            was_named.append(path.exists())

    with locked(path, "it", print, patience_s=0.0):
        waiter = threading.Thread(target=wait)
        waiter.start()
        assert is_waiting.wait(30)
        path.unlink()
    waiter.join(30)
    assert was_named == [not faulty]


def test_a_file_without_a_name(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with path.open("rb") as file:
        assert is_named(file.fileno(), path)
        path.unlink()
        assert not is_named(file.fileno(), path)
        path.touch()
        assert not is_named(file.fileno(), path)


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    path = tmp_path / "x.lock"
    code = (
        "import os, signal, sys; from megatron_hdp.files import locked\n"
        "with locked(sys.argv[1], 'it', print, patience_s=0.0): os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=REPOSITORY, check=False)
    assert done.returncode == -signal.SIGKILL and path.read_text().startswith("process ")
    with locked(path, "it", print, patience_s=0.0):
        pass


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def none(*arguments):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    refused = pytest.raises(OSError, match="Operation not supported: no lock.*: '.*x.lock'")
    with refused, locked(tmp_path / "x.lock", "source web", print, patience_s=1.0):
        pytest.fail("it has no lock")
