"""One node's part of a Ray cluster that lives as long as its job.

The first node holds the head, the others join it. `ray start --block` and all that it starts have
SIGTERM and SIGUSR1 blocked: Slurm sends its warnings to every process of a job's step, and a raylet
that got one would end, and its actors with it. ``ray stop`` is never called, as it would end other
jobs' clusters on the node, too; only what was started here is ended. If this process is killed, the
kernel kills `ray start` (on Linux), and its head and raylet; the node's keeper kills the rest.
"""

import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from megatron_hdp.data_plane.cluster.job_folder import RAY
from megatron_hdp.processes import end_with_parent
from megatron_hdp.processes.ports import free_port

_LOOK_S = 2.0
_WATCH_S = 0.25
_END_S = 10.0  # in which what was killed is gone
_START = Path(__file__).with_name("start_node.py")
_HEAD, _NODE = "gcs_server", "raylet"
_FRUGALITY = {
    # Else memory of an answer that was read is free a second later, and others take more.
    "RAY_free_objects_period_milliseconds": "0",
    # Else each process counts its calls, and the head keeps 100,000 of them.
    "RAY_task_events_report_interval_ms": "0",
    # By which runtime environments name a function that workers call first.
    "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": (
        "megatron_hdp.data_plane.cluster.connect.leave_out_addons"
    ),
}
_OBJECT_STORE_BYTES = 256 * 2**20  # nobody puts anything into it


@contextmanager
def ray_node(
    address: str, node: int, folder: Path, start_s: float, tell: Callable[[str], None]
) -> Iterator["subprocess.Popen[bytes]"]:
    """This node in the cluster, while the block runs; call it with Slurm's warnings blocked.

    Args:
        address: of the head, ``IP:PORT``.
        node: 0 for the head.
        folder: of the job, below which Ray's is.
        start_s: within which the head must answer, and Ray on this node be up.
        tell: called once, in another thread, if Ray on this node ends within the block, and why:
            Ray itself may wait for minutes, in C++, for its head that was killed.

    Raises:
        TimeoutError: the head does not answer in time.
    """
    if node > 0:
        _wait_for_head(address, start_s)
    process = subprocess.Popen(
        start_command(address, node, f"{folder}/{RAY}"),
        stdin=subprocess.DEVNULL,
        preexec_fn=partial(end_with_parent, os.getpid()),
        env=limits_of_start(start_s) | _FRUGALITY | os.environ,
    )
    is_over = threading.Event()
    watch = threading.Thread(target=_watch, args=(process, is_over, tell), daemon=True)
    try:
        watch.start()
        if node == 0:
            _wait_for_head(address, start_s)
        yield process
    finally:
        is_over.set()
        watch.join()
        _kill(process)


def _watch(
    process: "subprocess.Popen[bytes]", is_over: threading.Event, tell: Callable[[str], None]
) -> None:
    """Tell of the first of Ray's processes that ends."""
    found: dict[str, psutil.Process] = {}
    while not is_over.wait(_WATCH_S):
        if _NODE not in found:  # a head starts before its raylet
            for one in _children(process.pid):
                with suppress(psutil.Error):
                    found[one.name()] = one
        ended = [name for name in (_HEAD, _NODE) if name in found and not _runs(found[name])]
        if not ended and process.poll() is None:
            continue
        what = f"its {ended[0]} is dead" if ended else f"it ended with {process.returncode}"
        tell(f"Ray on this node has ended: {what}")
        return


def _children(pid: int, recursive: bool = False) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    with suppress(psutil.Error):
        found = psutil.Process(pid).children(recursive)
    return found


def limits_of_start(seconds: float) -> dict[str, str]:
    """Variables that let Ray's processes wait this long for each other at a start.

    Without them Ray gives up after 30 s; a busy machine needs that for the imports of its agents.
    """
    whole = str(math.ceil(seconds))
    return {
        "RAY_raylet_start_wait_time_s": whole,  # `start_node` reads it, too
        "RAY_agent_register_timeout_ms": f"{whole}000",
        "RAY_gcs_server_port_wait_time_s": whole,  # also how often the head is asked, once a second
    }


def start_command(address: str, node: int, folder: str) -> list[str]:
    """The words of ``ray start`` for one node.

    All ports but the head's are free ones, so that clusters may share a node. Ray gets what Slurm
    gives the job; without Slurm it counts by itself.
    """
    host, _, port = address.rpartition(":")
    words = [sys.executable, str(_START), "start", "--block"]
    if node == 0:
        words += ["--head", f"--port={port}", f"--node-ip-address={host}"]
        words += ["--include-dashboard=false", "--no-monitor"]  # of an autoscaler
    else:
        words += [f"--address={address}"]
    words += ["--disable-usage-stats", "--include-log-monitor=false", f"--temp-dir={folder}"]
    words += [f"--object-store-memory={_OBJECT_STORE_BYTES}"]
    for name in ("node-manager", "object-manager", "min-worker", "max-worker"):
        words.append(f"--{name}-port=0")
    # not 0: Ray would wait for its agents to name theirs, and give up on a busy machine
    agents = "dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent"
    taken = [int(port)]
    for name in (*agents, "metrics-export"):  # the last likewise: half of what a start takes
        taken.append(free_port(taken))
        words.append(f"--{name}-port={taken[-1]}")
    for option, variable in (("cpus", "SLURM_CPUS_ON_NODE"), ("gpus", "SLURM_GPUS_ON_NODE")):
        if os.environ.get(variable, "").isdigit():
            words.append(f"--num-{option}={os.environ[variable]}")
    return words


def _wait_for_head(address: str, start_s: float) -> None:
    deadline = time.monotonic() + start_s
    while not answers(address):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"found no Ray head at {address} after {start_s:.0f} s, expected one on node 0 at "
                "an address that all nodes reach: see node 0's log, or raise timeout-s of loaders"
            )
        time.sleep(_LOOK_S / 4)


def answers(address: str) -> bool:
    """Whether somebody listens at ``HOST:PORT``."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_LOOK_S).close()
    except OSError:
        return False
    return True


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill `ray start` and all below it, as they block SIGTERM."""
    tree = _children(process.pid, recursive=True)
    for one in tree:
        with suppress(psutil.Error):
            one.kill()
    process.kill()
    process.wait()
    deadline = time.monotonic() + _END_S
    while any(map(_runs, tree)) and time.monotonic() < deadline:
        time.sleep(0.02)  # a killed process keeps its ports for a moment


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
