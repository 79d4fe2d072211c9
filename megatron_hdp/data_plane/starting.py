"""A rank starts its node's part of the data plane, and ends it."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_hdp.data_plane import keeper
from megatron_hdp.data_plane.cluster.job_folder import PREFIX, SHARED_MEMORY, folder_of_job
from megatron_hdp.data_plane.names import END_SIGNAL
from megatron_hdp.data_plane.node_files import last_words, log_of
from megatron_hdp.processes.ports import free_port

_END_S = 20.0
SOCKET = "node.sock"
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # off: Ray listens on the loopback alone
_NICENESS = "RAY_worker_niceness"  # else 15: on a busy node, ranks would wait for starved actors
_FRUGALITY = {
    # Else each thread that allocates gets an arena, which keeps what the thread has freed.
    "MALLOC_ARENA_MAX": "2",
    # Else Arrow keeps what it has freed of the parts of tables in a pool of its own.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
_PROMPTNESS = {
    # Who asks an actor that has died hears of it in 0.1 s, else after 1 to 2 s: Ray waits for the
    # reason of the death, and looks once a second whether it came.
    "RAY_timeout_ms_task_wait_for_death_info": "50",
    "RAY_core_worker_internal_heartbeat_ms": "100",
}


@dataclass(frozen=True)
class PlanePlace:
    """One job's data plane, the same on all its nodes."""

    name: str
    address: str | None
    """Of the Ray head that is started for it; None: the cluster of RAY_ADDRESS is joined."""
    token: str
    """By which the nodes of a cluster that is started know each other."""
    num_nodes: int

    @classmethod
    def make(cls, host: str, num_nodes: int) -> PlanePlace:
        """Return a new one.

        Args:
            host: address of this node that the others reach; on one node the loopback's.
            num_nodes: of the job.
        """
        joins = bool(os.environ.get("RAY_ADDRESS"))
        return cls(
            name=f"{PREFIX}{secrets.token_hex(4)}",
            address=None if joins else f"{host}:{free_port()}",
            token=os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32),
            num_nodes=num_nodes,
        )


@contextmanager
def node_of_plane(
    place: PlanePlace, node: int, timeout_s: float, num_spares: int = 0
) -> Iterator[Path]:
    """This node's part of a plane, while the block runs; the first rank of the node enters it.

    Args:
        place: of the plane.
        node: number of the node; 0 holds planner and head.
        timeout_s: within which planner and loaders must answer.
        num_spares: loaders that will be wanted, which node 0 starts before anybody asks.

    Yields:
        The node's folder, in which the socket will be.
    """
    with (
        folder_of_job() as (folder, lock),
        folder_of_job(SHARED_MEMORY) as (shared, shared_lock),
    ):
        words = [
            *(sys.executable, "-m", "megatron_hdp.data_plane.keeper", folder, shared),
            *("--plane", place.name, "--timeout", str(timeout_s)),
            *("--folder", folder, "--shared", shared),
            *("--node", str(node), "--nodes", str(place.num_nodes)),
            *("--spares", str(num_spares)),
        ]
        environment = dict(os.environ)
        for name in [one for one in environment if one.startswith("TORCHELASTIC_")]:
            del environment[name]
        environment.pop("RANK", None)
        environment = {_NICENESS: "0", **_FRUGALITY, **_PROMPTNESS, **environment}
        if place.address is not None:
            words += ["--address", place.address]
            environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": place.token}
            if place.num_nodes == 1:
                environment[_LOOPBACK] = "0"
        with log_of(Path(folder)).open("wb") as log:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(lock, shared_lock),
                preexec_fn=partial(keeper.begin, os.getpid()),
                start_new_session=True,  # Ctrl-C is for ranks, which save and still want data
            )
        try:
            yield Path(folder)
        finally:
            process.send_signal(END_SIGNAL)
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if words_at_end := last_words(Path(folder)):
                print(words_at_end, file=sys.stderr, flush=True)
