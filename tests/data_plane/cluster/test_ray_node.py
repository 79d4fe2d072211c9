"""A node's part of a Ray cluster, with a stand-in for ``ray start``: up, and ended whole."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megatron_hdp.data_plane.cluster import ray_node
from megatron_hdp.data_plane.names import WARNINGS
from megatron_hdp.processes import ports
from megatron_hdp.processes.ports import free_port
from tests.support.node import until

START_S = 240.0

# listens as a head does, in a child that hears no SIGTERM; a worker only starts the child
RAY = """
import signal, socket, subprocess, sys, time
words = sys.argv[1:]
open("words", "a").write(" ".join(words) + chr(10))
if "fails" in open("mode").read():
    sys.exit("planted: cannot start")
listen = "import socket, time; s = socket.create_server(('127.0.0.1', int({port}))); time.sleep(60)"
port = [word.partition("=")[2] for word in words if word.startswith("--port=")]
code = listen.format(port=port[0]) if port else "import time; time.sleep(60)"
subprocess.Popen([sys.executable, "-c", code])
time.sleep(60)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch, temporary):
    """A folder to work in, with a package ray; ``mode`` tells what it does."""
    for name, text in {
        **dict.fromkeys(("__init__.py", "scripts/__init__.py", "_private/__init__.py"), ""),
        "_private/node.py": "class Node: ...",
        "_private/services.py": "def get_node(gcs_address, node_id): ...",
        "scripts/scripts.py": RAY,
    }.items():
        path = tmp_path / "packages/ray" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "mode").write_text("runs")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_node, "_LOOK_S", 0.2)
    return tmp_path


def started_since(before):
    """What runs below this process and is not in `before`."""
    children = psutil.Process().children(recursive=True)
    return [one for one in children if one not in before and is_alive(one)]


def is_alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_head_is_up_in_the_block_and_gone_after_it(stand_in):
    address = f"127.0.0.1:{free_port()}"
    before = started_since([])
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)
    told = []
    try:
        with ray_node.ray_node(address, 0, stand_in, START_S, told.append) as process:
            assert ray_node.answers(address) and len(started_since(before)) == 2
            for one in started_since(before):  # what Slurm sends to all of a step's processes
                one.send_signal(signal.SIGTERM)
                one.send_signal(signal.SIGUSR1)
            time.sleep(0.3)
            assert ray_node.answers(address) and process.poll() is None
            assert f"--temp-dir={stand_in}/r" in Path("words").read_text().split()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
    assert not ray_node.answers(address) and started_since(before) == [] == told


def test_a_worker_joins_a_head_that_answers(stand_in):
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        with ray_node.ray_node(address, 1, stand_in, START_S, print) as process:
            until(lambda: Path("words").exists() and Path("words").read_text(), START_S)
            assert process.poll() is None
    assert f"--address={address}" in Path("words").read_text()


def test_a_head_that_never_answers_is_reported(stand_in):
    address = f"127.0.0.1:{free_port()}"
    with (
        pytest.raises(TimeoutError, match=f"{address} after 0 s.*timeout-s"),
        ray_node.ray_node(address, 1, stand_in, 0.5, print),
    ):
        pass


@pytest.mark.parametrize(
    "victim, why",
    [
        ("gcs_server", ["its gcs_server is dead"]),
        ("raylet", ["its raylet is dead"]),
        ("ray start", ["it ended with -9"]),
        (None, []),
    ],
)
def test_what_dies_of_ray_is_told_at_once(tmp_path, monkeypatch, victim, why):
    """`ray start` may wait for minutes for one that was killed: it is not asked."""
    monkeypatch.setattr(ray_node, "_WATCH_S", 0.02)
    for name in ("gcs_server", "raylet"):
        (tmp_path / name).symlink_to(shutil.which("sleep"))
    start = f"{tmp_path}/gcs_server 60 & {tmp_path}/raylet 60 & wait; exec sleep 60"
    told, is_over = [], threading.Event()
    with subprocess.Popen(["bash", "-c", start]) as process:
        watch = threading.Thread(target=ray_node._watch, args=(process, is_over, told.append))
        watch.start()
        pids = {"ray start": process.pid}

        def has_started():
            pids.update((one.name(), one.pid) for one in psutil.Process(process.pid).children())
            return {"gcs_server", "raylet"} <= pids.keys()

        try:
            until(has_started, START_S)
            if victim is not None:
                time.sleep(2 * ray_node._WATCH_S)  # it is looked at
                os.kill(pids[victim], signal.SIGKILL)
                until(lambda: told, START_S)
        finally:
            is_over.set()
            watch.join()
            for pid in pids.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert told == [f"Ray on this node has ended: {one}" for one in why]


def test_ray_gets_the_time_that_a_start_may_take(stand_in, monkeypatch):
    """Its processes wait for each other that long; what the user has set is theirs."""
    monkeypatch.setenv("RAY_agent_register_timeout_ms", "7")
    address = f"127.0.0.1:{free_port()}"
    with ray_node.ray_node(address, 0, stand_in, 33.5, print) as process:
        environment = psutil.Process(process.pid).environ()
    assert environment["RAY_raylet_start_wait_time_s"] == "34"
    assert environment["RAY_agent_register_timeout_ms"] == "7"


def test_what_ray_is_started_with(monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "96")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    head = ray_node.start_command("10.0.0.7:24567", 0, "/tmp/x")
    expected = {"--head", "--port=24567", "--node-ip-address=10.0.0.7", "--temp-dir=/tmp/x"}
    expected |= {"--num-cpus=96", "--num-gpus=8", "--include-dashboard=false", "--block"}
    assert expected | {"--disable-usage-stats"} <= set(head)
    for name in ("dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent"):
        (port,) = [one.partition("=")[2] for one in head if one.startswith(f"--{name}-port=")]
        assert int(port) > 0, name  # Ray would wait for its agents to name theirs
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")
    worker = ray_node.start_command("10.0.0.7:24567", 3, "/tmp/x")
    assert "--address=10.0.0.7:24567" in worker and "--head" not in worker
    assert not any(word.startswith("--num-gpus") for word in worker)  # Ray counts by itself


def test_no_two_of_its_servers_get_the_same_port(monkeypatch):
    """Ray would refuse to start, once in some 2,000 times."""
    begin = 24567
    monkeypatch.setattr(ports, "_LOWEST", begin)
    monkeypatch.setattr(ports, "_begin_of_given_out", lambda: begin + 6)
    words = ray_node.start_command(f"10.0.0.7:{begin}", 0, "/tmp/x")
    found = [one.partition("=")[2] for one in words if "-port=" in one]
    given = [one for one in found if one != "0"]
    assert len(given) == len(set(given)) == 5


def test_ray_knows_these_options():
    """Ray's own parser reads the words; it starts nothing."""
    scripts = pytest.importorskip("ray.scripts.scripts", reason="pip install 'megatron-hdp[ray]'")
    for node in (0, 1):
        words = ray_node.start_command("10.0.0.7:24567", node, "/tmp/x")
        scripts.start.make_context("start", words[words.index("start") + 1 :])


NODE = """
import sys, time
from pathlib import Path
from megatron_hdp.data_plane.cluster import ray_node
with ray_node.ray_node(sys.argv[1], 0, Path.cwd(), 60.0, print) as process:
    print(process.pid, flush=True)
    time.sleep(60)
"""


def test_ray_ends_when_the_process_that_started_it_is_killed(stand_in, monkeypatch):
    root = Path(__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", f"{stand_in / 'packages'}:{root}")
    command = [sys.executable, "-c", NODE, f"127.0.0.1:{free_port()}"]
    starter = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    ray = psutil.Process(int(starter.stdout.readline()))
    tree = [ray, *ray.children(recursive=True)]
    try:
        starter.kill()
        starter.wait()
        until(lambda: not is_alive(ray), START_S)
    finally:
        for one in tree:
            if is_alive(one):
                one.kill()
        starter.stdout.close()
