"""One node's part of the data plane: ``python -m megatron_hdp.data_plane.host``, run by its keeper.

It starts Ray on the node or joins a cluster, starts the node's constructor and, on the first node,
planner and loaders, and watches them. Its keeper ends what it started, however it ends itself.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from megatron_hdp.data_plane.actors import start_constructor, start_planner
from megatron_hdp.data_plane.cluster.connect import connected
from megatron_hdp.data_plane.cluster.job_folder import RAY
from megatron_hdp.data_plane.cluster.ray_node import ray_node
from megatron_hdp.data_plane.names import (
    CONTROL,
    END_SIGNAL,
    NAMESPACE,
    WARNINGS,
    constructor_of,
)
from megatron_hdp.data_plane.node_files import mark_alive, mark_lost, write_status
from megatron_hdp.data_plane.supervisor import Supervisor
from megatron_hdp.exit_codes import ExitCode

_LOOK_S = 0.5
_FIRST_LOOKS_S = 0.05
_ANSWER_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one node's part until it is told to end, or Ray is lost; return an exit code."""
    options = _parser().parse_args(argv)
    signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)
    signal.signal(END_SIGNAL, lambda number, frame: sys.exit(ExitCode.DONE))
    folder = Path(options.folder)
    mark_alive(folder)
    more: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": True}

    def say_lost(why: str) -> None:
        _say(f"node {options.node}: {why}")
        mark_lost(folder, why)  # ranks end the host then

    def end_lost(why: str) -> None:
        say_lost(why)
        os._exit(ExitCode.FAILED)

    try:
        with ExitStack() as stack:
            address, start_s = options.address, options.timeout
            if address is not None:
                ray_here = ray_node(address, options.node, folder, start_s, end_lost)
                stack.enter_context(ray_here)
                more["_temp_dir"] = f"{folder}/{RAY}"  # another node may be on this host, too
            with connected(address, start_s, **more):
                _Host(options).run()
    except (OSError, ValueError, RuntimeError, RayError) as error:
        say_lost(str(error))
        return ExitCode.FAILED
    return ExitCode.DONE


class _Host:
    def __init__(self, options: argparse.Namespace) -> None:
        self._plane: str = options.plane
        self._node: int = options.node
        self._nodes: int = options.nodes
        self._folder = Path(options.folder)
        self._constructor = start_constructor(
            self._plane, self._node, self._folder, Path(options.shared), options.timeout
        )
        self._waited_for: dict[tuple[int, str, str], int] = {}
        self._trouble = ""  # logged last, so that it is logged once
        self._failed: set[tuple[str, str]] = set()
        self._supervisor: Supervisor | None = None
        self._planner: Any = None
        if self._node == 0:
            self._planner = start_planner(self._plane, self._folder, options.timeout)
            self._supervisor = Supervisor(self._plane, self._planner, options.spares)

    def run(self) -> None:
        """Look at everything, again and again."""
        began = time.monotonic()
        while True:
            self._look()
            quick = time.monotonic() - began < _ANSWER_S
            time.sleep(_FIRST_LOOKS_S if quick else _LOOK_S)

    def _look(self) -> None:
        found: dict[str, Any] = {"plane": self._plane, "node": self._node, "pid": os.getpid()}
        try:
            asked = self._constructor.figures.remote()
            if self._supervisor is not None:
                self._supervisor.look(self._nodes, self._behind())
                call = self._planner.figures.options(concurrency_group=CONTROL)
                found["planner"] = ray.get(call.remote(), timeout=_ANSWER_S)
                self._log_failures(found["planner"]["failed"])
                found["sources"] = self._supervisor.figures()
            found["constructor"] = ray.get(asked, timeout=_ANSWER_S)
            write_status(self._folder, found)
            self._trouble = ""
        except (RayError, OSError) as error:  # an actor is being started again, or the disk is full
            trouble = str(error).splitlines()[0]
            if trouble != self._trouble:
                _say(f"node {self._node}: {trouble}")
            self._trouble = trouble

    def _log_failures(self, failed: Mapping[str, Mapping[str, str]]) -> None:
        """Log once, by split, each source that the planner continues without."""
        for split, sources in failed.items():
            for source, why in sources.items():
                if (split, source) not in self._failed:
                    self._failed.add((split, source))
                    _say(f"{split} continues without source '{source}': {why}")

    def _behind(self) -> dict[str, set[str]]:
        """For each split, sources that a rank of any node has waited for since the last time."""
        behind: dict[str, set[str]] = {}
        for node in range(self._nodes):
            try:
                name = constructor_of(self._plane, node)
                actor = ray.get_actor(name, namespace=NAMESPACE)
                splits = ray.get(actor.figures.remote(), timeout=_ANSWER_S)["splits"]
            except (ValueError, RayError):  # it is not there yet, or being started again
                continue
            for split, found in splits.items():
                for source, count in found["waited_for"].items():
                    before = self._waited_for.get((node, split, source), 0)
                    if count > before:
                        behind.setdefault(split, set()).add(source)
                    self._waited_for[node, split, source] = count
        return behind


def _say(text: str) -> None:
    with suppress(OSError):  # the disk is full: the planner, which must write, ends the job
        print(f"data plane: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megatron_hdp.data_plane.host")
    add = parser.add_argument
    add("--plane", required=True, help="its name, the same on all nodes")
    add("--folder", required=True, help="of this node, for this user alone")
    add("--shared", required=True, help="a second one, in shared memory")
    add("--node", type=int, required=True)
    add("--nodes", type=int, required=True)
    add("--address", help="of the Ray head that the plane starts (default: join RAY_ADDRESS)")
    add("--spares", type=int, default=0, help="loaders to start before sources are known")
    add("--timeout", type=float, required=True, help="seconds within which all must answer")
    return parser


if __name__ == "__main__":
    sys.exit(main())
