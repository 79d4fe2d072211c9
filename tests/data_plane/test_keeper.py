"""Whoever dies of a rank, its keeper and their host: processes end, files of a dead job go."""

import errno
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatron_hdp.data_plane import node_files
from megatron_hdp.data_plane.cluster.job_folder import LOST
from megatron_hdp.data_plane.node_files import last_words, mark_lost, why_lost
from tests.support.node import until

ROOT = Path(__file__).parents[2]
END_S = 60.0

RANK = """
import os, subprocess, sys, tempfile, time
from functools import partial
from pathlib import Path
from megatron_hdp.data_plane import keeper
from megatron_hdp.data_plane.cluster.job_folder import folder_of_job
from megatron_hdp.data_plane.names import END_SIGNAL

with folder_of_job() as (folder, lock), folder_of_job(Path(sys.argv[1])) as (shared, other):
    process = subprocess.Popen(
        [sys.executable, "-c", sys.argv[2], folder, shared, folder],
        pass_fds=(lock, other),
        stdout=subprocess.DEVNULL,
        preexec_fn=partial(keeper.begin, os.getpid()),
    )
    print(process.pid, folder, shared, flush=True)
    sys.stdin.readline()
    process.send_signal(END_SIGNAL)
    print(process.wait(), flush=True)
"""
KEEPER = """
import sys
from megatron_hdp.data_plane import keeper
keeper._HOST, keeper._END_S = "stand_in", 0.5
sys.exit(keeper.main())
"""
# as Ray's agents are: in a session of their own, deaf to warnings, and orphans once the host ends
HOST = """
import os, signal, subprocess, sys, time
from megatron_hdp.data_plane.names import END_SIGNAL, WARNINGS

subprocess.Popen(["sh", "-c", "setsid -f sleep 600; sleep 600; :"])
assert WARNINGS <= signal.pthread_sigmask(signal.SIG_BLOCK, ())
(how,) = os.environ["HOW"].split()
if how == "ends-well":
    signal.signal(END_SIGNAL, lambda number, frame: sys.exit(0))
if how == "is-deaf":
    signal.signal(END_SIGNAL, signal.SIG_IGN)
open(sys.argv[1] + "/up", "w").close()
time.sleep(600 if how != "fails" else 1)
sys.exit(1)
"""


@pytest.fixture
def started(tmp_path, temporary, monkeypatch):
    """Starts a rank, its keeper and a host of some kind; returns the first two and both folders."""
    (tmp_path / "stand_in.py").write_text(HOST)
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    ranks, trees = [], []

    def start(how):
        monkeypatch.setenv("HOW", how)
        command = [sys.executable, "-c", RANK, str(tmp_path / "shared"), KEEPER]
        rank = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
        )
        ranks.append(rank)
        pid, *names = rank.stdout.readline().split()
        folders = [Path(one) for one in names]
        keeper = psutil.Process(int(pid))
        until((folders[0] / "up").exists, END_S)
        until(lambda: len(keeper.children(recursive=True)) == 4 or how == "fails", END_S)
        trees.extend([keeper, *keeper.children(recursive=True)])
        return rank, keeper, folders

    yield start
    try:
        until(lambda: not [one for one in trees if is_alive(one)], END_S)
    finally:
        for one in (*ranks, *(one for one in trees if is_alive(one))):
            one.kill()
        for one in ranks:
            one.wait()
            one.stdin.close()
            one.stdout.close()


def is_alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def end(rank):
    """The rank ends its part; returns the keeper's exit code."""
    code, _ = rank.communicate("\n")
    return int(code)


@pytest.mark.parametrize("how", ["ends-well", "is-deaf"])
def test_a_rank_ends_its_host(started, how):
    rank, _, folders = started(how)
    assert end(rank) == 0
    assert not any(one.exists() for one in folders)


@pytest.mark.parametrize("how", ["ends-well", "is-deaf"])
def test_a_rank_is_killed(started, how):
    rank, _, folders = started(how)
    rank.kill()
    until(lambda: not any(one.exists() for one in folders), END_S)


@pytest.mark.parametrize(
    "how, why", [("fails", "has ended with 1"), ("is-killed", "has ended with -9")]
)
def test_a_host_ends_by_itself(started, how, why):
    """What it started is dead before the rank asks; the folder tells why, and stays."""
    rank, keeper, (folder, shared) = started(how)
    if how == "is-killed":
        keeper.children()[0].kill()
    until((folder / LOST).exists, END_S)
    until(lambda: keeper.children() == [], END_S)
    assert rank.poll() is None and folder.exists() and shared.exists()
    assert end(rank) == 0
    assert why in (folder / LOST).read_text() and not shared.exists()


def test_a_keeper_is_killed(started):
    """Its host ends with it, as the kernel knows; the rank does not wait."""
    rank, keeper, (folder, _) = started("is-deaf")
    host, orphans = keeper.children()[0], keeper.children(recursive=True)[1:]
    keeper.kill()
    until(lambda: not is_alive(host), END_S)
    for one in orphans:  # which nobody finds any more: Ray's end by themselves
        one.kill()
    assert end(rank) == -signal.SIGKILL
    assert not folder.exists()


def test_of_a_plane_that_ended_badly_the_last_lines_are_shown(tmp_path):
    assert last_words(tmp_path) is None
    mark_lost(tmp_path, "why")
    assert last_words(tmp_path) is None  # somebody has removed the log
    mark_lost(tmp_path, "what followed from it")
    (tmp_path / "log").write_bytes(
        b"x" * 10**6 + b"\n" + b"".join(b"%d\xff\n" % i for i in range(99))
    )
    head, *lines = last_words(tmp_path).splitlines()
    assert f"the last lines of {tmp_path}/log:" in head and "doctor --clean-up" in head
    assert lines == [f"  {number}\ufffd" for number in range(79, 99)]
    assert why_lost(tmp_path) == "why"


def test_a_log_stays_though_there_is_no_room_for_the_reason(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", path)

    monkeypatch.setattr(node_files, "write_own", full)
    (tmp_path / "log").write_text("last line")
    mark_lost(tmp_path, "why")
    assert why_lost(tmp_path) == "" and last_words(tmp_path).endswith(":\n  last line")


def test_the_keeper_is_small():
    """It lives as long as the job, and nobody who looks for memory finds it."""
    code = "import sys; from megatron_hdp.data_plane import keeper; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    heavy = {"numpy", "torch", "ray", "asyncio"}
    assert not heavy & set(found.stdout.split())
