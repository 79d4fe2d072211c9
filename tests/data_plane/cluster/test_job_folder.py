"""What dead jobs left in the folder for temporary files goes; what lives or is not ours stays."""

import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron_hdp.data_plane.cluster import job_folder as folders
from megatron_hdp.data_plane.cluster.job_folder import folder_of_job

ROOT = Path(__file__).parents[3]
JOB = """
import os, sys, time
from megatron_hdp.data_plane.cluster.job_folder import folder_of_job
with folder_of_job() as (folder, lock):
    if sys.argv[1] == "helped" and os.fork() == 0:  # shares the lock
        time.sleep(60)
    print(folder, flush=True)
    time.sleep(60)
"""


def job(how="alone"):
    """A job in a process group of its own, and its folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", JOB, how],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return process, Path(process.stdout.readline().strip())


def kill(process):
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_folder_is_there_in_the_block_only(temporary):
    with pytest.raises(RuntimeError), folder_of_job() as (folder, _):
        assert Path(folder).parent == temporary and Path(folder).is_dir()
        raise RuntimeError
    assert list(temporary.iterdir()) == []


def test_the_folder_of_a_killed_job_goes_at_the_next_start(temporary):
    (killed, dead), (lives, living) = job(), job("helped")
    (dead / "session").mkdir()
    (dead / "session/log").touch()
    try:
        kill(killed)
        assert dead.exists()
        with folder_of_job():
            assert not dead.exists() and living.exists()
        kill(lives)
        with folder_of_job():
            assert living.exists()  # whoever shares the lock still works there
    finally:
        os.killpg(lives.pid, signal.SIGKILL)


def test_what_is_not_known_to_be_dead_stays(temporary, monkeypatch):
    kept = [temporary / name for name in ("hdp-data-unlocked", "hdp-data-elsewhere", "other")]
    for folder in kept:
        folder.mkdir()
    (kept[1] / "host").write_text("another-host")
    (kept[2] / "host").write_text(socket.gethostname())
    (temporary / "hdp-data-link").symlink_to(kept[2])
    kept.append(temporary / "hdp-data-pipe")
    kept[-1].mkdir()
    os.mkfifo(kept[-1] / "host")
    with folder_of_job():
        assert all(folder.exists() for folder in kept)
    ours = temporary / "hdp-data-ours"
    ours.mkdir()
    (ours / "host").write_text(socket.gethostname())
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with folder_of_job():
        assert ours.exists()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with folder_of_job():
        assert not ours.exists()


def test_where_there_is_no_room_nothing_is_left(tmp_path, monkeypatch):
    def full(file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folders.os, "write", full)
    with (
        pytest.raises(ValueError, match=f"{tmp_path}: .*No space left.*doctor --clean-up"),
        folder_of_job(tmp_path),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_of_jobs_that_ended_badly_some_folders_stay(temporary, monkeypatch):
    """The log in it tells why; `even_lost` is what a user asks for."""
    monkeypatch.setattr(folders, "_MOST_KEPT", 2)
    kept = []
    for number in range(4):
        with folder_of_job() as (folder, _):
            (Path(folder) / folders.LOST).write_text("why")
        os.utime(folder, (number, number))
        kept.append(Path(folder))
        assert folders.folders_of_jobs(alive=True) == []
    with folder_of_job() as (half, _):  # somebody has removed the rest
        (Path(half) / folders.LOST).touch()
        (Path(half) / "host").unlink()
    assert not Path(half).exists()
    with folder_of_job() as (living, _):
        assert set(folders.folders_of_jobs(alive=False)) == set(kept[2:])
        assert not folders.remove_dead(Path(living), even_lost=True)
    assert not folders.remove_dead(kept[2]) and folders.remove_dead(kept[3], even_lost=True)
    assert list(temporary.iterdir()) == [kept[2]]


def test_what_still_works_for_a_dead_job_ends(temporary):
    """Agents of Ray do, for a minute; a user who reads the log there does not end."""
    killed, dead = job()
    kill(killed)
    logs = [Path(dead, "r"), Path(f"{dead}-of-another", "r")]
    for log in logs:
        log.mkdir(parents=True)
        (log / "agent.log").touch()
    code = "import sys, time; file = open(sys.argv[1]); print(flush=True); time.sleep(60)"
    words = [  # its own, what it has open, and a word more
        (sys.executable, "/dev/null", f"--temp-dir={dead}/r"),
        ("ray::DashboardAgent", f"{logs[0]}/agent.log", ""),
        (sys.executable, "/dev/null", f"{dead}/r"),
        (sys.executable, f"{logs[0]}/agent.log", ""),
        (sys.executable, "/dev/null", f"--temp-dir={dead}-of-another/r"),
        ("ray::DashboardAgent", f"{logs[1]}/agent.log", ""),
    ]
    running = [
        subprocess.Popen(
            [own, "-c", code, *rest], executable=sys.executable, stdout=subprocess.PIPE
        )
        for own, *rest in words
    ]
    try:
        for one in running:
            one.stdout.readline()
        assert folders.remove_dead(dead)
        assert [one.wait(60) for one in running[:2]] == [-signal.SIGKILL] * 2
        assert [one.poll() for one in running[2:]] == [None] * 4
    finally:
        for one in running:
            kill(one)


def test_a_long_folder_for_temporary_files_is_not_taken(monkeypatch):
    """Below it the names of Ray's sockets would be longer than names of sockets may be."""
    longest = "/" + "x" * (107 - len("/hdp-data-12345678" + folders._RAYS_SOCKET) - 1)
    for found in (longest, longest + "x", "/scratch/größer/als/gut"):
        monkeypatch.setattr(folders.tempfile, "gettempdir", lambda found=found: found)
        assert folders._short_folder() == (longest if found == longest else "/tmp")


def test_no_folder_at_all_is_told(monkeypatch, tmp_path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(folders, "_SHORT", str(tmp_path / "gone"))
    with (
        pytest.raises(ValueError, match="TMPDIR=.*x' and no room .*gone.*at most 23 bytes") as told,
        folder_of_job(),
    ):
        pass
    assert "set TMPDIR to a folder of yours" in str(told.value)
