"""The host's CPU time for a hop of a ring, beside that of torch's ``batch_isend_irecv`` alone.

Nothing is sent.
Attention hides it where a hop's attention takes the GPU longer than this takes the host. Run:
``python scripts/benchmarks/bench_hop.py``; PyTorch's fake process group, events that do nothing.
"""

from statistics import median
from time import process_time

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_hdp.runtime.clocks import DeviceClock
from megatron_hdp.runtime.ring import RingComm, RingGroup
from megatron_hdp.runtime.timeline import Timeline

NUM_RANKS, HOPS, ROUNDS = 8, 300, 40


class Event:
    """As `torch.cuda.Event`, at no cost."""

    def record(self) -> None:
        """The device passes it at once."""

    def synchronize(self) -> None:
        """See `record`."""

    def query(self) -> bool:
        """See `record`."""
        return True

    def elapsed_time(self, later: object) -> float:
        """Milliseconds."""
        return 1.0


def main() -> None:
    """Prints medians of rounds that take turns."""
    dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    world, ring = dist.group.WORLD, tuple(range(NUM_RANKS))
    comm = RingComm(world, Timeline(DeviceClock(Event)))
    sent, received = torch.zeros(1024), torch.zeros(1024)

    def alone(group: dist.ProcessGroup) -> None:
        operations = [
            dist.P2POp(dist.isend, sent, 1, group),
            dist.P2POp(dist.irecv, received, NUM_RANKS - 1, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    light = RingGroup(comm, ring)
    kinds = {
        "batch_isend_irecv alone": lambda: alone(world),
        "a hop of our ring": lambda: comm.pass_on(sent, ring, 0, into=received).wait(),
        "a library's, through its group": lambda: alone(light),
    }
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(ROUNDS):
        for name, hop in kinds.items():
            began_s = process_time()
            for _ in range(HOPS):
                hop()
            taken[name].append((process_time() - began_s) / HOPS)
        comm.timeline.reset()
    least = median(next(iter(taken.values())))
    for name, seconds in taken.items():
        print(f"{name:<32}{median(seconds) * 1e6:6.1f} us  {median(seconds) / least:.2f} x")


if __name__ == "__main__":
    main()
