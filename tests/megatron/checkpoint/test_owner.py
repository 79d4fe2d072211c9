"""One living process owns a folder of checkpoints, whoever starts, stops, dies or returns."""

import json
import multiprocessing
import os
import random
import signal
import threading
import time
from contextlib import closing
from dataclasses import asdict, replace
from unittest import mock

import pytest

from megatron_hdp.megatron.checkpoint import owner
from megatron_hdp.megatron.checkpoint.owner import Ownership, Process

fork = multiprocessing.get_context("fork")
SHORT = {"silence_s": 1.5, "same_job_s": 1.0}


@pytest.fixture(autouse=True)
def _no_job(monkeypatch):
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(owner, "_TELL_S", 0.1)
    monkeypatch.setattr(owner, "_LOOK_S", 0.05)


def records(folder):
    return sorted(path.name for path in folder.glob("owner-*.json"))


def write_record(folder, number=1, text=None, **changes):
    """The record of another process, which does not count."""
    process = replace(Process.this(), **changes)
    text = f"{json.dumps(asdict(process))}\n" if text is None else text
    (folder / f"owner-{number}.json").write_text(text)


ELSEWHERE = {"host": "n7", "machine": "n7 another boot"}


def test_it_is_there_while_the_run_lasts(tmp_path):
    folder = tmp_path / "new" / "checkpoints"
    one = Ownership(folder)
    assert records(folder) == ["owner-1.json"]
    one.require()
    assert one.release()
    assert not (tmp_path / "new").exists()  # nothing was saved


def test_what_was_saved_stays(tmp_path):
    one = Ownership(tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "iter_0000001").mkdir()
    one.release()
    assert os.listdir(tmp_path / "checkpoints") == ["iter_0000001"]


def test_a_second_one_is_refused_and_told_whose_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    one = Ownership(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "43")
    with pytest.raises(ValueError, match=rf"process {os.getpid()} on .* \(Slurm job 42\)"):
        Ownership(tmp_path)
    one.require()
    one.release()


def test_a_process_of_this_host_that_is_gone_is_followed_at_once(tmp_path):
    child = fork.Process(target=lambda: Ownership(tmp_path) and os._exit(0))
    child.start()
    child.join()
    assert records(tmp_path) == ["owner-1.json"]
    began = time.monotonic()
    one = Ownership(tmp_path, silence_s=60.0)
    assert time.monotonic() - began < 5
    assert records(tmp_path) == ["owner-2.json"]
    one.release()


def test_a_process_that_waits_to_be_reaped_is_gone(tmp_path):
    child = os.fork()
    if child == 0:
        write_record(tmp_path)
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    try:
        Ownership(tmp_path, silence_s=60.0).release()
    finally:
        os.waitpid(child, 0)


def test_an_id_that_another_process_has_by_now_does_not_count(tmp_path):
    write_record(tmp_path, started="1")  # this process's id, started at another time
    Ownership(tmp_path, silence_s=60.0).release()


@pytest.mark.parametrize("text", [None, "", "{", "[]"], ids=["whole", "empty", "cut", "other"])
def test_silence_elsewhere_is_waited_for(tmp_path, text):
    write_record(tmp_path, 3, text, **ELSEWHERE)
    began, lines = time.monotonic(), []
    one = Ownership(tmp_path, lines.append, **SHORT)
    assert time.monotonic() - began >= SHORT["silence_s"]
    assert records(tmp_path) == ["owner-4.json"]
    assert len(lines) == 1 and ("on n7" if text is None else "unknown owner") in lines[0]
    one.release()


def test_life_elsewhere_refuses_at_once(tmp_path):
    write_record(tmp_path, **ELSEWHERE)
    path, stop = tmp_path / "owner-1.json", threading.Event()

    def live():
        while not stop.wait(0.05):
            with path.open("a") as file:
                file.write("1")

    thread = threading.Thread(target=live)
    thread.start()
    began = time.monotonic()
    with pytest.raises(ValueError, match="on n7"):
        Ownership(tmp_path, silence_s=60.0)
    assert time.monotonic() - began < 5
    stop.set()
    thread.join()


def test_clocks_are_not_compared(tmp_path):
    write_record(tmp_path, **ELSEWHERE)
    for moment in (0, 2**31):
        os.utime(tmp_path / "owner-1.json", (moment, moment))
        began = time.monotonic()
        with closing_release(Ownership(tmp_path, **SHORT)):
            assert time.monotonic() - began >= SHORT["silence_s"]
        write_record(tmp_path, **ELSEWHERE)


def closing_release(ownership):
    ownership.close = ownership.release
    return closing(ownership)


def test_a_restart_waits_for_what_is_left_of_the_job(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-1")
    child = fork.Process(target=lambda: Ownership(tmp_path) and time.sleep(60))
    child.start()
    while not records(tmp_path):
        time.sleep(0.02)
    threading.Timer(0.5, child.kill).start()
    one = Ownership(tmp_path, same_job_s=30.0)
    one.release()
    child.join()


def test_two_of_one_job_that_both_live_are_refused_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-1")
    one = Ownership(tmp_path)
    with pytest.raises(ValueError, match="torchrun's run run-1"):
        Ownership(tmp_path, **SHORT)
    one.release()


def test_a_run_id_that_torchrun_gives_every_job_is_none(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert Process.this().job is None


def race(folder, gate, answers):
    gate.wait()
    try:
        one = Ownership(folder, **SHORT)
    except ValueError:
        answers.put(0)
        return
    one.require()
    answers.put(1)
    gate.wait()


@pytest.mark.parametrize("dead", [None, "here", "elsewhere"])
def test_of_many_that_start_at_one_moment_one_wins(tmp_path, dead):
    if dead is not None:
        write_record(tmp_path, 5, **(ELSEWHERE if dead == "elsewhere" else {"started": "1"}))
    number = 6
    gate, answers = fork.Barrier(number + 1), fork.Queue()
    racers = [fork.Process(target=race, args=(tmp_path, gate, answers)) for _ in range(number)]
    for racer in racers:
        racer.start()
    gate.wait()
    assert sorted(answers.get(timeout=30) for _ in racers) == [0] * (number - 1) + [1]
    assert len(records(tmp_path)) == 1
    for racer in racers:
        racer.kill()
        racer.join()


def test_who_was_stopped_and_followed_finds_out(tmp_path):
    one = Ownership(tmp_path, **SHORT)
    write_record(tmp_path, 2, **ELSEWHERE)  # what another host makes that has heard nothing
    with pytest.raises(ValueError, match="does not belong to this job any more: found .* on n7"):
        one.require()
    one.release()
    assert records(tmp_path) == ["owner-1.json", "owner-2.json"][1:]


def test_who_was_followed_and_the_follower_is_done_finds_out_too(tmp_path):
    one = Ownership(tmp_path, **SHORT)
    (tmp_path / "owner-1.json").unlink()
    (tmp_path / "iter_0000007").mkdir()
    with pytest.raises(ValueError, match="no record of an owner"):
        one.require()
    one.release()


def test_a_folder_that_was_removed_is_made_again(tmp_path):
    folder = tmp_path / "checkpoints"
    one = Ownership(folder)
    for path in (*folder.iterdir(), folder):
        path.unlink() if path.is_file() else path.rmdir()
    one.require()
    one.require()
    assert records(folder) == ["owner-1.json"]
    with pytest.raises(ValueError, match="belongs to another job"):
        Ownership(folder)
    one.release()
    assert not folder.exists()


def test_the_count_goes_on_while_another_process_is_stopped(tmp_path):
    """Of a process on this host that is stopped the id is there, so it is no dead owner."""
    child = fork.Process(target=lambda: Ownership(tmp_path) and time.sleep(60))
    child.start()
    while not records(tmp_path):
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(ValueError, match=f"process {child.pid} on"):
        Ownership(tmp_path, **SHORT)
    child.kill()
    child.join()


def test_a_file_system_that_hangs_does_not_hold_the_end_up(tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "_RELEASE_S", 0.3)
    hanging, goes_on = threading.Event(), threading.Event()

    def pwrite(file, *_):
        if file == one._file:
            hanging.set()
            goes_on.wait(30)

    one = Ownership(tmp_path)
    with mock.patch("os.pwrite", pwrite):
        assert hanging.wait(10)
        began = time.monotonic()
        assert not one.release()
        assert time.monotonic() - began < 5
    goes_on.set()


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


def take_turns(scratch, seed, faulty):
    """A job that starts again and again, and is alone in the folder whenever it owns it."""
    if faulty:
        Process.has_ended = lambda self: True
    draw, mine = random.Random(seed), scratch / f"inside-{os.getpid()}"
    while True:
        try:
            one = Ownership(scratch / "checkpoints", silence_s=60.0)
        except ValueError:
            time.sleep(draw.uniform(0.0, 0.01))
            continue
        for other in scratch.glob("inside-*"):
            if owner._started(int(other.name.removeprefix("inside-"))) is not None:
                (scratch / f"violation-{os.getpid()}-{other.name}").touch()
        mine.touch()
        time.sleep(draw.uniform(0.0, 0.02))
        one.require()
        mine.unlink()
        one.release()
        with (scratch / "turns").open("a") as file:
            file.write("1")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("faulty, seconds", [(False, 20), (True, 5)], ids=["right", "faulty"])
def test_starts_ends_and_kills_at_any_moment(tmp_path, faulty, seconds):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    draw, kills = random.Random(seed), 0

    def start():
        job = fork.Process(target=take_turns, args=(tmp_path, draw.randrange(10**6), faulty))
        job.start()
        return job

    jobs = [start() for _ in range(6)]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(draw.uniform(0.0, 0.1))
        number = draw.randrange(len(jobs))
        jobs[number].kill()
        jobs[number].join()
        jobs[number] = start()
        kills += 1
    for job in jobs:
        job.kill()
        job.join()
    turns = (tmp_path / "turns").stat().st_size if (tmp_path / "turns").exists() else 0
    print(f"{turns} turns, {kills} kills")
    assert bool(list(tmp_path.glob("violation-*"))) == faulty
    assert kills > 20 and (faulty or turns > 50)
