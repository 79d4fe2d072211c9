"""One node's ranks as real processes: their place, their output, warnings, and their end."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from megatron_hdp.ray_launch import node_ranks
from megatron_hdp.ray_launch.node_ranks import NodeRanks, Placement

# a rank that listens after a while, as real ones do
LISTENS = """
import os, signal, sys, time
time.sleep(0.5)
def end(*_):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it comes again and again
    os.write(1, f"rank {os.environ['RANK']} ends\\n".encode())
    sys.exit(0)
signal.signal(signal.SIGUSR1, end)
time.sleep(60)
"""


def placement(folder, **changes):
    settings = {
        "node": 1,
        "num_nodes": 3,
        "ranks_per_node": 2,
        "master_address": "10.0.0.7",
        "master_port": 4711,
        "folder": str(folder),
        "log": str(folder / "node-1.log"),
    }
    return Placement(**(settings | changes))


def end_of(ranks, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while None in (codes := ranks.codes()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return codes


def test_ranks_find_their_place_as_under_torchrun(tmp_path):
    code = "import json, os; print(json.dumps(dict(os.environ) | {'PWD': os.getcwd()}))"
    ranks = NodeRanks(placement(tmp_path), ["-c", code], {"OMP_NUM_THREADS": "3"})
    assert end_of(ranks) == [0, 0]
    told = [json.loads(line) for line in (tmp_path / "node-1.log").read_text().splitlines()]
    assert sorted(one["RANK"] for one in told) == ["2", "3"]
    for one in told:
        expected = {
            "LOCAL_RANK": str(int(one["RANK"]) - 2),
            "GROUP_RANK": "1",
            "WORLD_SIZE": "6",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_WORLD_SIZE": "3",
            "MASTER_ADDR": "10.0.0.7",
            "MASTER_PORT": "4711",
            "OMP_NUM_THREADS": "3",
            "PWD": str(tmp_path),
        }
        assert one.items() >= expected.items()


def test_a_warning_does_not_end_a_rank_that_does_not_listen_yet(tmp_path):
    """Nor does one that this process blocks, as Ray's do, stay closed to its ranks."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    try:
        ranks = NodeRanks(placement(tmp_path), ["-c", LISTENS], {})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    deadline = time.monotonic() + 30
    while None in (codes := ranks.codes()):
        assert time.monotonic() < deadline
        ranks.warn()
        time.sleep(0.05)
    assert codes == [0, 0]
    assert sorted((tmp_path / "node-1.log").read_text().splitlines()) == [
        "rank 2 ends",
        "rank 3 ends",
    ]


def test_exit_codes_and_killing(tmp_path):
    code = "import os, time; os.environ['RANK'] == '2' and os._exit(7); time.sleep(60)"
    ranks = NodeRanks(placement(tmp_path), ["-c", code], {})
    deadline = time.monotonic() + 30
    while ranks.codes() != [7, None]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    ranks.kill()
    assert end_of(ranks) == [7, -signal.SIGKILL]
    ranks.warn()  # nobody is there any more


@pytest.mark.skipif(sys.platform != "linux", reason="other systems leave such processes alone")
def test_ranks_end_with_the_process_that_started_them(tmp_path):
    starter = f"""
import sys, time
from megatron_hdp.ray_launch.node_ranks import NodeRanks, Placement
p = Placement(node=0, num_nodes=1, ranks_per_node=2, master_address="h", master_port=1,
              folder={str(tmp_path)!r}, log=None)
NodeRanks(p, ["-c", "import os, time; os.write(1, b'%d\\\\n' % os.getpid()); time.sleep(60)"], {{}})
time.sleep(60)
"""
    command = [sys.executable, "-c", starter]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_free_port_can_be_bound():
    import socket

    with socket.socket() as bound:
        bound.bind(("", node_ranks.free_port()))
