"""Starts ranks by Ray: on a cluster that runs already, or on one made for the job.

::

    RAY_ADDRESS=... python -m megatron_hdp.ray_launch --nodes 2 --ranks-per-node 8 \
        -m megatron_hdp.pretrain_gpt --hybrid-data-parallel --config my.yaml
    export RAY_AUTH_TOKEN=$(openssl rand -hex 32)
    srun --ntasks-per-node=1 python -m megatron_hdp.ray_launch --start-ray n01:24000 ...

Ends with 0, 2 after a mistake of the user's, or the exit code of the rank to blame. SIGUSR1 or
SIGTERM: every rank saves and ends.
"""

import argparse
import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.ray_launch.cluster import WARNINGS, ray_node, wait_until_head_is_gone
from megatron_hdp.ray_launch.watching import report, watch

_GRACE_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one job, or one node's part of it, and returns its exit code."""
    options = build_parser().parse_args(argv)
    # until the launcher listens; what it starts inherits this
    signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)
    try:
        _check(options)
        if options.start_ray is None:
            return _launch(options, None, None)
        host, _, port = options.start_ray.rpartition(":")
        address = f"{socket.gethostbyname(host)}:{port}"
        os.environ["RAY_AUTH_MODE"] = "token"
        with ray_node(address, options.node_rank) as process:
            if options.node_rank == 0:
                return _launch(options, address, process)
            wait_until_head_is_gone(address, process)
            return ExitCode.DONE
    except ValueError as error:
        print(f"ray_launch: error: {error}", file=sys.stderr, flush=True)
        return ExitCode.MISTAKE
    except (OSError, RuntimeError) as error:  # TimeoutError and ConnectionError among them
        print(f"ray_launch: error: {error}", file=sys.stderr, flush=True)
        return ExitCode.FAILED


def build_parser() -> argparse.ArgumentParser:
    """Return the launcher's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_hdp.ray_launch",
        description="Starts a job's ranks by Ray, one actor a node.",
    )
    add = parser.add_argument
    add("--nodes", type=int, metavar="N", help="nodes to take (default: all that Ray has)")
    add("--ranks-per-node", type=int, metavar="N", default=1, help="with GPUs: one each")
    add("--logs", metavar="DIR", help="a file of the ranks' output for each node goes here")
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="for the ranks' environment, which else is that of Ray's nodes; without VALUE as here",
    )
    add(
        "--start-ray",
        metavar="HOST:PORT",
        help="make a Ray cluster for this job with its head there; this command runs on every node",
    )
    add(
        "--node-rank",
        type=int,
        metavar="N",
        default=int(os.environ.get("SLURM_NODEID", "0")),
        help="with --start-ray: this node's number, 0 is HOST (default: SLURM_NODEID)",
    )
    add("-m", dest="is_module", action="store_true", help="what is run is a module, not a file")
    add("script", help="what every rank runs")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _check(options: argparse.Namespace) -> None:
    for name in ("nodes", "ranks_per_node"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; expected at least 1")
    address = options.start_ray
    if address is not None and not address.rpartition(":")[2].isdigit():
        raise ValueError(f"--start-ray is {address!r}; expected HOST:PORT")
    if address is not None and not os.environ.get("RAY_AUTH_TOKEN"):
        raise ValueError(
            "--start-ray found no RAY_AUTH_TOKEN; expected one that all nodes of the job share, by "
            "which they know each other: export RAY_AUTH_TOKEN=$(openssl rand -hex 32) before srun"
        )
    if importlib.util.find_spec("ray") is None:
        raise ValueError(
            "found no package ray in this Python; expected Ray 2.60 or newer on every node: "
            "pip install 'megatron-hdp[ray]', or use torchrun (LAUNCHER=torchrun)"
        )


def _launch(
    options: argparse.Namespace,
    address: str | None,
    process: "subprocess.Popen[bytes] | None",
) -> int:
    from megatron_hdp.ray_launch import actors

    module = ["-m"] if options.is_module else []
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # Ray sets another
    if options.logs is not None:
        Path(options.logs).mkdir(parents=True, exist_ok=True)
    job = actors.Job(
        words=(*module, options.script, *options.arguments),
        ranks_per_node=options.ranks_per_node,
        num_nodes=options.nodes,
        logs=None if options.logs is None else str(Path(options.logs).resolve()),
        environment=threads | dict(_variable(text) for text in options.env),
    )
    actors.join(job, address, process)
    try:
        is_warned = _Warnings()
        fleet = actors.start(job)
        print(
            f"ray_launch: {job.ranks_per_node} ranks on each of {', '.join(fleet.hosts)}",
            flush=True,
        )
        ended = watch(fleet, is_warned, grace_s=_GRACE_S)
    finally:
        actors.disconnect()
    if text := report(ended, fleet.hosts, job.ranks_per_node):
        print(text, flush=True)
    return ended.exit_code()


def _variable(text: str) -> tuple[str, str]:
    name, has_value, value = text.partition("=")
    if not has_value and name not in os.environ:
        raise ValueError(f"--env {name}: found no such variable here; give {name}=VALUE")
    return name, value if has_value else os.environ[name]


class _Warnings:
    """Whether a warning has come; Ray's own handler of SIGTERM, put there by connecting, goes."""

    def __init__(self) -> None:
        self._warned = False
        for number in WARNINGS:
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._warned = True

    def __call__(self) -> bool:
        return self._warned


if __name__ == "__main__":
    sys.exit(main())
