"""The ranks as Ray has them: one actor a node, spread strictly, each with its node's GPUs.

The one module, with `connecting`, that imports Ray.
"""

import os
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_hdp.ray_launch.cluster import START_S
from megatron_hdp.ray_launch.connecting import connect
from megatron_hdp.ray_launch.node_ranks import NodeRanks, Placement, free_port

_KILLED = -9


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be started."""

    words: tuple[str, ...]
    """Of the ranks' command, after ``python``."""
    ranks_per_node: int
    num_nodes: int | None
    """None: all nodes that can take them."""
    logs: str | None
    """Folder of the ranks' output, a file a node."""
    environment: dict[str, str]
    """More of it for the ranks."""


class _Node:
    """The actor: one node's ranks."""

    def __init__(self) -> None:
        self._ranks: NodeRanks | None = None

    def where(self) -> tuple[int, str, str]:
        """What nodes are ordered by: Slurm's number, then address; and the host's name."""
        number = int(os.environ.get("SLURM_NODEID", "0"))
        host = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        return number, ray.util.get_node_ip_address(), host

    def free_port(self) -> int:
        return free_port()

    def start(self, placement: Placement, words: Sequence[str], more: dict[str, str]) -> None:
        self._ranks = NodeRanks(placement, words, more)

    def codes(self) -> list[int | None]:
        return self._ranks.codes() if self._ranks else []

    def warn(self) -> None:
        if self._ranks:
            self._ranks.warn()

    def kill(self) -> None:
        if self._ranks:
            self._ranks.kill()


class RayFleet:
    """All ranks of a job (`watching.Fleet`); a node that Ray has lost counts as killed ranks."""

    def __init__(self, actors: Sequence[Any], hosts: Sequence[str], ranks_per_node: int) -> None:
        self.hosts = tuple(hosts)
        self._actors = tuple(actors)
        self._codes: list[list[int | None]] = [[None] * ranks_per_node for _ in actors]
        self._asked: dict[Any, int] = {}

    def codes(self) -> list[int | None]:
        """Exit codes by rank, as far as the nodes have answered within a second."""
        running = {node for node, codes in enumerate(self._codes) if None in codes}
        for node in running - set(self._asked.values()):
            self._asked[self._actors[node].codes.remote()] = node
        answered, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=1.0)
        for answer in answered:
            node = self._asked.pop(answer)
            try:
                self._codes[node] = ray.get(answer)
            except RayActorError as error:
                print(f"node {node} ({self.hosts[node]}) is lost: {error}", flush=True)
                self._codes[node] = [_KILLED if c is None else c for c in self._codes[node]]
        return [code for codes in self._codes for code in codes]

    def warn(self) -> None:
        """Asks all ranks that run to save and end."""
        for actor in self._actors:
            actor.warn.remote()

    def kill(self) -> None:
        """Ends all ranks that run."""
        for actor in self._actors:
            actor.kill.remote()


def join(job: Job, address: str | None, process: "subprocess.Popen[bytes] | None") -> None:
    """Joins the cluster at `address`, begun here by `process`, or (None) that of RAY_ADDRESS.

    Raises:
        ConnectionError: there is none that takes this process.
        RuntimeError: Ray on this node has not come up.
    """
    connect(address, process, START_S, log_to_driver=job.logs is None)


def start(job: Job) -> RayFleet:
    """Places the actors and starts the ranks.

    Raises:
        ValueError: the cluster has no room for them.
        TimeoutError: it has not as many nodes, or they are busy.
    """
    gpus = job.ranks_per_node if ray.cluster_resources().get("GPU") else 0
    num_nodes = _wait_for_nodes(job, gpus)
    bundle = {"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}
    group = placement_group([bundle] * num_nodes, strategy="STRICT_SPREAD")
    if not group.wait(timeout_seconds=START_S):
        remove_placement_group(group)
        raise TimeoutError(
            f"Ray has no room for {bundle} on each of {num_nodes} nodes after {START_S:.0f} s, "
            f"free are {ray.available_resources()}: end what else runs there, or take fewer --nodes"
        )
    make = ray.remote(_Node)
    actors = [
        make.options(
            num_cpus=1,
            num_gpus=gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            ),
        ).remote()
        for index in range(num_nodes)
    ]
    places = ray.get([actor.where.remote() for actor in actors])
    order = sorted(range(num_nodes), key=places.__getitem__)
    actors, places = [actors[i] for i in order], [places[i] for i in order]
    port = ray.get(actors[0].free_port.remote())
    started = []
    for node, (actor, (_, _, host)) in enumerate(zip(actors, places, strict=True)):
        placement = Placement(
            node=node,
            num_nodes=num_nodes,
            ranks_per_node=job.ranks_per_node,
            master_address=places[0][1],
            master_port=port,
            folder=os.getcwd(),
            log=None if job.logs is None else f"{job.logs}/node-{node}-{host}.log",
        )
        started.append(actor.start.remote(placement, job.words, job.environment))
    ray.get(started)
    return RayFleet(actors, [host for _, _, host in places], job.ranks_per_node)


def _wait_for_nodes(job: Job, gpus: int) -> int:
    """How many nodes take part, once there are as many as asked for."""
    deadline = time.monotonic() + START_S
    while True:
        alive = [node for node in ray.nodes() if node["Alive"]]
        fitting = [node for node in alive if node["Resources"].get("GPU", 0) >= gpus]
        if len(fitting) >= (job.num_nodes or 1):
            return job.num_nodes or len(fitting)
        if len(alive) >= (job.num_nodes or 1):
            found = sorted(int(node["Resources"].get("GPU", 0)) for node in alive)
            raise ValueError(
                f"found nodes with {found} GPUs in Ray, expected {job.num_nodes or 1} with {gpus} "
                "for the ranks of a node: give another number of --ranks-per-node or --nodes"
            )
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"found {len(alive)} nodes in Ray after {START_S:.0f} s, expected {job.num_nodes}: "
                "see the logs of the nodes that are missing, or take fewer --nodes"
            )
        time.sleep(1)


def disconnect() -> None:
    """Leaves the cluster; Ray ends the actors, and they their ranks."""
    ray.shutdown()
