"""A rank's threads run on the CPUs of its GPU's NUMA node, so what they pin lies beside the GPU.

Memory lies on the node of the CPU that touches it first, and copies between a GPU and the other
socket's memory are slower. All CPUs of the node are taken, not a share of them: ranks of one node
share them, and threads that plan or load data have as much room as before.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

SYSTEM = Path("/sys")


def bind(gpu: str, num_ranks: int, system: Path = SYSTEM) -> str:
    """Binds this process's threads to the NUMA node of a GPU, within the CPUs that it may use.

    Not if these were chosen for this rank (``torchrun --numa-binding``, numactl, Slurm's tasks):
    then they are on the node, or no more than each rank of the machine could have for itself. Those
    that all ranks share (a job's, a container's, all but the system's) are more. Threads with CPUs
    of their own keep them.

    Args:
        gpu: its PCI address, such as ``0000:dc:00.0``.
        num_ranks: on this machine.
        system: where sysfs is mounted.

    Returns:
        What was done, or why nothing was.
    """
    by_number = nodes(system)
    if len(by_number) < 2:
        return "any CPU: there is one NUMA node"
    number = node_of(gpu, system)
    if number not in by_number:
        return (
            f"any CPU: the machine does not say on which of its {len(by_number)} nodes the GPU is"
        )
    allowed, everything = os.sched_getaffinity(0), set().union(*by_number.values())
    near, found = (
        by_number[number] & allowed,
        [n for n, cpus in by_number.items() if cpus & allowed],
    )
    if near == allowed:
        return f"those of NUMA node {number}, as this rank's GPU, by whoever started it"
    kept = f"{len(allowed)} on NUMA nodes {found}, kept: this rank's GPU is on node {number}, but "
    if allowed != everything and len(allowed) * num_ranks <= len(everything):
        return f"{kept}they may be its own (torchrun --numa-binding=node binds all the same)"
    if 2 * len(near) * len(found) < len(allowed):  # half of what a node gives on average
        return f"{kept}of that node it may use {len(near)}"
    try:
        os.sched_setaffinity(0, near)
    except OSError as error:
        return f"any: the system refuses those of the GPU's NUMA node {number} ({error})"
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # it has just ended
            if os.sched_getaffinity(thread) == allowed:
                os.sched_setaffinity(thread, near)
    return f"the {len(near)} of NUMA node {number}, on which this rank's GPU is"


def nodes(system: Path = SYSTEM) -> dict[int, set[int]]:
    """The CPUs of each NUMA node that has some: a node may be memory alone."""
    lists = (system / "devices/system/node").glob("node[0-9]*/cpulist")
    found = {int(path.parent.name[4:]): _numbers(path.read_text()) for path in lists}
    return {node: cpus for node, cpus in sorted(found.items()) if cpus}


def node_of(gpu: str, system: Path = SYSTEM) -> int | None:
    """The node that a GPU is on; -1 or None where the machine does not say."""
    path = system / "bus/pci/devices" / gpu / "numa_node"
    return int(path.read_text()) if path.exists() else None


def _numbers(text: str) -> set[int]:
    """``0-2,8`` gives 0, 1, 2 and 8."""
    ends = [one.split("-") for one in text.strip().split(",") if one]
    return {number for one in ends for number in range(int(one[0]), int(one[-1]) + 1)}
