"""One living process owns a folder of checkpoints, whoever starts, stops, dies or returns."""

import json
import multiprocessing
import os
import random
import threading
import time
from unittest import mock

import psutil
import pytest

from megatron_hdp.megatron.checkpoint import owner
from megatron_hdp.megatron.checkpoint.owner import Ownership

fork = multiprocessing.get_context("fork")
GONE = 2**22 + 1  # no process has this id
ELSEWHERE = "n7 another boot"
SAVED = "iter_0000001"


@pytest.fixture(autouse=True)
def looks(monkeypatch):
    """Counts looks at another's record instead of waiting between them."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(owner, "_BEAT_S", 0.01)
    sleep = mock.Mock()
    monkeypatch.setattr(owner, "sleep", sleep)
    return sleep


def records(folder):
    return sorted(path.name for path in folder.glob("owner-*.json"))


def write_record(folder, number=1, machine=ELSEWHERE, pid=GONE, text=None):
    """The record of another process, which does not renew it."""
    text = json.dumps([f"process {pid} on n7", pid, machine, "word"]) if text is None else text
    path = folder / f"owner-{number}.json"
    path.write_text(text)
    return path


def test_the_record_is_there_while_the_run_lasts(tmp_path):
    folder = tmp_path / "new" / "checkpoints"
    one = Ownership(folder)
    assert records(folder) == ["owner-1.json"]
    one.require()
    assert one.release()
    assert not (tmp_path / "new").exists()  # nothing was saved
    one = Ownership(folder)
    (folder / SAVED).mkdir()
    assert one.release() and os.listdir(folder) == [SAVED]


def test_a_living_owner_is_waited_for_then_named(tmp_path, monkeypatch, looks):
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    one, lines = Ownership(tmp_path), []
    beats = iter(range(10**6))
    looks.side_effect = lambda _: os.utime(tmp_path / "owner-1.json", ns=(0, next(beats)))
    with pytest.raises(ValueError, match=rf"process {os.getpid()} on .* \(Slurm job 42\)"):
        Ownership(tmp_path, lines.append)
    assert looks.call_count * owner._LOOK_S >= owner._SILENCE_S - owner._LOOK_S
    assert len(lines) == 1 and "waiting for the end of process" in lines[0]
    looks.side_effect = lambda _: one.release()  # it may end in time
    Ownership(tmp_path).release()


def test_a_beat_renews_the_record(tmp_path):
    one = Ownership(tmp_path)
    os.utime(tmp_path / "owner-1.json", (0, 0))
    while not (tmp_path / "owner-1.json").stat().st_mtime:
        time.sleep(0.01)
    one.release()


def test_a_process_of_this_machine_that_has_ended_is_followed_at_once(tmp_path, looks):
    write_record(tmp_path, machine=owner._machine())
    one = Ownership(tmp_path)
    assert records(tmp_path) == ["owner-2.json"] and not looks.called
    one.release()
    write_record(tmp_path, machine=owner._machine(), pid=os.getpid())  # its id is in use again
    Ownership(tmp_path).release()
    assert looks.called


@pytest.mark.parametrize("text", [None, "", "{", "[]"], ids=["whole", "empty", "cut", "other"])
@pytest.mark.parametrize("moment", [0, 2**31])
def test_silence_is_waited_for_whatever_the_clock_says(tmp_path, looks, text, moment):
    os.utime(write_record(tmp_path, 3, text=text), (moment, moment))
    one = Ownership(tmp_path)
    assert looks.call_count * owner._LOOK_S >= owner._SILENCE_S
    assert records(tmp_path) == ["owner-4.json"]
    one.release()


def test_who_was_suspended_and_followed_finds_out(tmp_path):
    one = Ownership(tmp_path)
    write_record(tmp_path, 2)  # another host has seen no beat
    with pytest.raises(ValueError, match="does not belong to this job any more: found .* on n7"):
        one.require()
    (tmp_path / "owner-2.json").rename(tmp_path / "owner-1.json")  # a follower of the follower
    with pytest.raises(ValueError, match="does not belong to this job any more: found .* on n7"):
        one.require()
    one.release()
    assert records(tmp_path) == ["owner-1.json"]
    (tmp_path / "owner-1.json").unlink()
    (tmp_path / SAVED).mkdir()
    with pytest.raises(ValueError, match="no record of an owner"):
        one.require()


def test_a_folder_that_was_removed_is_made_again(tmp_path):
    folder = tmp_path / "checkpoints"
    one = Ownership(folder)
    (folder / "owner-1.json").unlink()
    folder.rmdir()
    one.require()
    one.require()
    assert records(folder) == ["owner-1.json"]
    one.release()
    assert not folder.exists()


def test_a_file_system_that_hangs_does_not_hold_the_end_up(tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "_RELEASE_S", 0.1)
    hanging, answers = threading.Event(), threading.Event()
    with mock.patch("os.utime", lambda _: hanging.set() or answers.wait()):
        one = Ownership(tmp_path)
        hanging.wait()
        assert not one.release()
    answers.set()


def test_a_folder_that_cannot_be_made_or_written_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        Ownership(tmp_path / "file")
    with pytest.raises(OSError, match="too long"):
        Ownership(tmp_path / "new" / ("x" * 300))
    full = mock.patch("os.fsync", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with full, pytest.raises(OSError, match="No space left"):
        Ownership(tmp_path / "new")
    assert os.listdir(tmp_path) == ["file"]


class LooksAgainError(Exception):
    """Instead of waiting for a living owner."""


def test_a_dead_record_whose_number_begins_anew_is_another_one(tmp_path, looks):
    """Meanwhile one has followed the dead owner and ended, and a third one has begun at 1."""
    first, original = write_record(tmp_path, machine=owner._machine()), os.open
    looks.side_effect = LooksAgainError

    def late(path, *args):
        first.unlink(missing_ok=True)
        write_record(tmp_path, pid=os.getppid())
        return original(path, *args)

    with mock.patch("os.open", late), pytest.raises(LooksAgainError):
        Ownership(tmp_path)
    assert records(tmp_path) == ["owner-1.json"]


def take_turns(scratch, seed, faulty):
    """A job that starts again and again, and is alone in the folder whenever it owns it."""
    owner.sleep, owner._SILENCE_S = time.sleep, 600.0
    if faulty:
        owner._has_ended = lambda record: True
    draw, mine = random.Random(seed), scratch / f"inside-{os.getpid()}"
    for _ in range(30):
        one = Ownership(scratch / "checkpoints")
        for other in scratch.glob("inside-*"):
            pid = int(other.name.removeprefix("inside-"))
            if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                (scratch / f"violation-{os.getpid()}-{other.name}").touch()
        mine.touch()
        if draw.random() < 0.3:
            os._exit(1)  # as by a kill
        time.sleep(draw.uniform(0.0, 0.005))
        mine.unlink()
        one.release()


@pytest.mark.parametrize("faulty", [False, True], ids=["right", "faulty"])
def test_of_many_that_start_end_and_die_one_owns_it(tmp_path, monkeypatch, faulty):
    monkeypatch.setattr(owner, "_LOOK_S", 0.01)
    for start in range(6):
        args = [(tmp_path, 10 * start + number, faulty) for number in range(5)]
        jobs = [fork.Process(target=take_turns, args=one) for one in args]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
    assert bool(list(tmp_path.glob("violation-*"))) == faulty
