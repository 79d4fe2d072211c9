"""One node's part of a Ray cluster that lives as long as its job.

The first node holds the head, the others join it and leave when it is gone. `ray start --block`
and all that it starts have SIGTERM and SIGUSR1 blocked: Slurm sends its warnings to every process
of a job's step, and a raylet that heard one would end, and its ranks with it. Nothing is stopped by
name (``ray stop`` would end other jobs' clusters on the node, too), only what was started here. If
this process is killed, so is `ray start` (on Linux), which takes along what it started.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

import psutil

from megatron_hdp.processes import end_with_parent
from megatron_hdp.ray_launch.folder import folder_of_job
from megatron_hdp.ray_launch.node_ranks import free_port

WARNINGS = {signal.SIGTERM, signal.SIGUSR1}
START_S = 300.0  # unless another time is given
_LOOK_S = 2.0
_END_S = 10.0  # in which what was killed is gone
_LOOKS = 3  # so many in a row that fail, and the head is gone
_START = Path(__file__).with_name("start_node.py")
_TEMPORARY = "r"  # below the job's folder, as Ray opens its own to everybody; short for sockets
_OBJECT_STORE_BYTES = 256 * 2**20  # ranks put nothing into it


@contextmanager
def ray_node(
    address: str, node: int, start_s: float | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """This node in the cluster, while the block runs; call it with `WARNINGS` blocked.

    Args:
        address: of the head, ``IP:PORT``.
        node: 0 for the head.
        start_s: within which the head must answer, and Ray on this node be up; None: `START_S`.

    Raises:
        TimeoutError: the head does not answer in time.
        RuntimeError: Ray on this node has ended before its head answered.
    """
    start_s = START_S if start_s is None else start_s
    if node > 0:
        _wait_for_head(address, start_s)
    with _hang_up_raises(), folder_of_job() as (folder, lock):
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


@contextmanager
def _hang_up_raises() -> Iterator[None]:
    """Within the block SIGHUP, unless it is ignored, ends this process in order."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    with ExitStack() as stack:
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            signal.signal(signal.SIGHUP, leave)
            stack.callback(signal.signal, signal.SIGHUP, signal.SIG_DFL)
        yield


def limits_of_start(seconds: float) -> dict[str, str]:
    """Variables by which Ray's processes wait so long for each other at a start.

    Ray gives up after 30 s else, which a busy machine takes for the imports of its agents alone.
    """
    whole = str(math.ceil(seconds))
    return {
        "RAY_raylet_start_wait_time_s": whole,  # heeded by `start_node`, too
        "RAY_agent_register_timeout_ms": f"{whole}000",
        "RAY_gcs_server_port_wait_time_s": whole,  # also how often the head is asked, once a second
    }


def start_command(address: str, node: int, folder: str) -> list[str]:
    """The words of ``ray start`` for one node.

    Ports are free ones but the head's, so that clusters may share a node. What Slurm gives the job
    is what Ray gets; without Slurm Ray counts by itself.
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


def temporary_folder_of(process: "subprocess.Popen[bytes]") -> str:
    """The folder of temporary files of a node that `ray_node` has started."""
    assert isinstance(process.args, list)
    (folder,) = (
        word.removeprefix("--temp-dir=")
        for word in map(str, process.args)
        if word.startswith("--temp-dir=")
    )
    return folder


def wait_until_head_is_gone(address: str, process: "subprocess.Popen[bytes]") -> None:
    """Returns when the job is over.

    Raises:
        RuntimeError: this node's Ray has ended before.
    """
    failed = 0
    while failed < _LOOKS:
        if process.poll() is not None:
            raise RuntimeError(f"Ray on this node has ended with {process.returncode}")
        failed = 0 if answers(address) else failed + 1
        time.sleep(_LOOK_S)


def _wait_for_head(
    address: str, start_s: float, process: "subprocess.Popen[bytes] | None" = None
) -> None:
    deadline = time.monotonic() + start_s
    while not answers(address):
        if process is not None and process.poll() is not None:
            raise RuntimeError(
                f"Ray's head on {address} has ended with {process.returncode}; it says above why"
            )
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"no head of Ray answers on {address} after {start_s:.0f} s: see node 0's log; "
                "this must be an address of node 0 that all nodes reach (in the job script "
                "RENDEZVOUS_HOST and RENDEZVOUS_PORT)"
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
    """Ends `ray start` and all below it; what blocks SIGTERM cannot be asked."""
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
