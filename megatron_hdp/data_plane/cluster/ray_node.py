"""One node's part of a Ray cluster that lives as long as its job.

The first node holds the head, the others join it. `ray start --block` and all that it starts have
SIGTERM and SIGUSR1 blocked: Slurm sends its warnings to every process of a job's step, and a raylet
that got one would end, and its actors with it. ``ray stop`` is never called, as it would end other
jobs' clusters on the node, too; only what was started here is ended. If this process is killed, the
kernel kills `ray start` (on Linux), which takes along what it started.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from megatron_hdp.data_plane.cluster.job_folder import folder_of_job
from megatron_hdp.processes import end_with_parent

WARNINGS = {signal.SIGTERM, signal.SIGUSR1}
_LOOK_S = 2.0
_END_S = 10.0  # in which what was killed is gone
_START = Path(__file__).with_name("start_node.py")
_TEMPORARY = "r"  # below the job's folder, as Ray opens its own to everybody; short for sockets
_OBJECT_STORE_BYTES = 256 * 2**20  # nobody puts anything into it


@contextmanager
def ray_node(address: str, node: int, start_s: float) -> Iterator["subprocess.Popen[bytes]"]:
    """This node in the cluster, while the block runs; call it with `WARNINGS` blocked.

    Args:
        address: of the head, ``IP:PORT``.
        node: 0 for the head.
        start_s: within which the head must answer, and Ray on this node be up.

    Raises:
        TimeoutError: the head does not answer in time.
        RuntimeError: Ray on this node has ended before its head answered.
    """
    if node > 0:
        _wait_for_head(address, start_s)
    with folder_of_job() as (folder, lock):
        process = subprocess.Popen(
            start_command(address, node, f"{folder}/{_TEMPORARY}"),
            stdin=subprocess.DEVNULL,
            pass_fds=(lock,),
            preexec_fn=partial(end_with_parent, os.getpid()),
            env=limits_of_start(start_s) | os.environ,
        )
        try:
            if node == 0:
                _wait_for_head(address, start_s, process)
            yield process
        finally:
            _kill(process)


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
    for name in ("dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent"):
        words.append(f"--{name}-port={free_port()}")
    words.append(f"--metrics-export-port={free_port()}")  # likewise: half of what a start takes
    for option, variable in (("cpus", "SLURM_CPUS_ON_NODE"), ("gpus", "SLURM_GPUS_ON_NODE")):
        if os.environ.get(variable, "").isdigit():
            words.append(f"--num-{option}={os.environ[variable]}")
    return words


def _wait_for_head(
    address: str, start_s: float, process: "subprocess.Popen[bytes] | None" = None
) -> None:
    deadline = time.monotonic() + start_s
    while not answers(address):
        if process is not None and process.poll() is not None:
            raise RuntimeError(
                f"Ray's head on {address} ended with {process.returncode}: see its output above"
            )
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
    tree: list[psutil.Process] = []
    with suppress(psutil.Error):
        tree = psutil.Process(process.pid).children(recursive=True)
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


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as bound:
        bound.bind(("", 0))
        return int(bound.getsockname()[1])
