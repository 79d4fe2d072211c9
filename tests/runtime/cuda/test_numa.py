"""A rank's threads run on its GPU's NUMA node, unless somebody has chosen their CPUs."""

import os
import re
import threading
from types import SimpleNamespace

import pytest

from megatron_hdp.runtime.cuda import device, numa

GPU = "0000:dc:00.0"
ALL = set(range(8))


def machine(folder, nodes=("0-1,4-5", "2-3,6-7", ""), gpu_on="1"):
    """A sysfs: CPUs of each node, the last one being memory alone, and the node of a GPU."""
    for number, cpus in enumerate(nodes):
        path = folder / f"devices/system/node/node{number}/cpulist"
        path.parent.mkdir(parents=True)
        path.write_text(f"{cpus}\n")
    if gpu_on is not None:
        path = folder / "bus/pci/devices" / GPU / "numa_node"
        path.parent.mkdir(parents=True)
        path.write_text(f"{gpu_on}\n")
    return folder


class Threads:
    """Stands for the system: the CPUs of each thread; thread 13 ends while it is looked at."""

    def __init__(self, monkeypatch, cpus, refuses=False):
        self.cpus, self._refuses = cpus, refuses
        for name, function in (
            ("sched_getaffinity", self._get),
            ("sched_setaffinity", self._set),
            ("listdir", lambda path: [str(number or 10) for number in [*self.cpus, 13]]),
        ):
            monkeypatch.setattr(numa.os, name, function)

    def _get(self, number):
        if number == 13:
            raise ProcessLookupError
        return set(self.cpus[0 if number == 10 else number])

    def _set(self, number, cpus):
        if self._refuses:
            raise PermissionError("no")
        self.cpus[0 if number == 10 else number] = cpus


@pytest.mark.parametrize(
    ("how", "allowed", "bound", "words"),
    [
        ({}, ALL, {2, 3, 6, 7}, "the 4 of NUMA node 1"),
        ({"gpu_on": "0"}, ALL, {0, 1, 4, 5}, "the 4 of NUMA node 0"),
        # as torchrun --numa-binding, numactl or Slurm leave it
        ({}, {2, 3, 6, 7}, None, "those of NUMA node 1, as this rank's GPU, by whoever"),
        ({}, {3}, None, "those of NUMA node 1, as this rank's GPU, by whoever"),
        (
            {},
            {1, 2},
            None,
            r"2 on NUMA nodes \[0, 1\], kept: .* may be its own .*--numa-binding=node",
        ),
        ({}, {0, 4}, None, r"2 on NUMA nodes \[0\], kept: this rank's GPU is on node 1"),
        # shared by all four ranks: a container's, all but the system's
        ({}, {1, 2, 3}, {2, 3}, "the 2 of NUMA node 1"),
        ({}, ALL - {0, 6}, {2, 3, 7}, "the 3 of NUMA node 1"),
        ({}, {0, 1, 4}, None, r"3 on NUMA nodes \[0\], kept: .*of that node it may use 0"),
        ({}, {0, 1, 2, 4, 5}, None, r"5 on .*, kept: .*of that node it may use 1"),
        # nothing to choose from, or not told
        ({"nodes": ("0-7",), "gpu_on": "0"}, ALL, None, "there is one NUMA node"),
        ({"nodes": ("0-7",), "gpu_on": "-1"}, ALL, None, "there is one NUMA node"),
        ({"nodes": ()}, ALL, None, "there is one NUMA node"),
        ({"gpu_on": "-1"}, ALL, None, "does not say on which of its 2 nodes"),
        ({"gpu_on": None}, ALL, None, "does not say on which of its 2 nodes"),
        ({"gpu_on": "2"}, ALL, None, "does not say on which of its 2 nodes"),
    ],
)
def test_threads_are_bound(monkeypatch, tmp_path, how, allowed, bound, words):
    """Thread 11 was there before, 12 has a CPU of its own."""
    threads = Threads(monkeypatch, {0: allowed, 11: allowed, 12: {7}})
    told = numa.bind(GPU, 4, machine(tmp_path, **how))
    assert re.search(words, told), told
    wanted = bound or allowed
    assert threads.cpus == {0: wanted, 11: wanted, 12: {7}}


def test_a_system_that_refuses(monkeypatch, tmp_path):
    threads = Threads(monkeypatch, {0: ALL, 11: ALL}, refuses=True)
    assert "refuses those of the GPU's NUMA node 1 (no)" in numa.bind(GPU, 4, machine(tmp_path))
    assert threads.cpus == {0: ALL, 11: ALL}


def test_this_process(tmp_path):
    """Its threads really move, and those that they start."""
    before = os.sched_getaffinity(0)
    first, *others = sorted(before)
    if not others:
        pytest.skip("this process has one CPU: give it two")
    nodes = (",".join(map(str, others)), str(first))
    asked, found = threading.Event(), []
    waiting = threading.Thread(target=lambda: (asked.wait(), found.append(os.sched_getaffinity(0))))
    waiting.start()
    try:
        numa.bind(GPU, 1, machine(tmp_path, nodes))
        late = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        late.start()
        late.join()
    finally:
        asked.set()
        waiting.join()
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), before)
    assert found == [{first}, {first}]


def driver_of(error):
    def address(text, size, number):
        text.value = b"0000:DC:00.0"
        return 0

    return SimpleNamespace(cuDeviceGet=lambda found, index: error, cuDeviceGetPCIBusId=address)


def test_the_address_is_as_sysfs_writes_it(monkeypatch):
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: driver_of(0))
    assert device.pci_address(3) == GPU
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: driver_of(101))
    with pytest.raises(RuntimeError, match="GPU 3: error 101"):
        device.pci_address(3)
