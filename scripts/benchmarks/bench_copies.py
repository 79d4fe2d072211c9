"""What copies of the optimizer's shards cost a step: steps with and without them, in turns.

Every rank's shard goes to a neighbour beside each step, as with ``--hdp-optimizer-copies on``.
Seconds are the median of the rounds, by the clock and of the CPU (all ranks, their threads
included, which says more where others use the machine). Run:
``python scripts/benchmarks/bench_copies.py``; gloo ranks on CPUs.
"""

import argparse
import tempfile
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from megatron.core import parallel_state

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.optimizer import ShardCopies
from megatron_hdp.megatron.options import parse_arguments
from megatron_hdp.runtime.gathering import largest
from megatron_hdp.session import HdpSession, TokenBatch

FLAGS = ["--config", "configs/tiny-cpu.yaml", "--use-distributed-optimizer"]
VOCABULARY = 257
LENGTHS = (900, 40, 300, 700, 200, 1500, 90)


class Steps:
    """Steps of one rank over one batch."""

    def __init__(self, options: argparse.Namespace) -> None:
        flags = [*FLAGS, "--hidden-size", str(options.hidden_size)]
        arguments = parse_arguments(["--hybrid-data-parallel", *flags], needs_data=False)
        parallel.initialise(arguments)
        self._session = HdpSession.from_flags(flags, vocab_size=VOCABULARY)
        self._optimizer = self._session.build_optimizer()
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        ranks = list(range(dist.get_world_size()))
        hosts = ["one"] * len(ranks)
        self.copies = ShardCopies(
            self._optimizer, self._session.chunks, ranks, hosts=hosts, place_group=group
        )
        data = np.random.default_rng(0)
        lengths = LENGTHS * options.repeats
        self._batch = TokenBatch([data.integers(0, VOCABULARY, length) for length in lengths])
        self._done = 0
        self.begun = 0

    def run(self, with_copies: bool) -> None:
        """A step."""
        agreed = -largest([-self.copies.complete], torch.device("cpu"))[0]
        if with_copies:
            self.begun += self.copies.begin(agreed)
        self._session.step(self._batch)
        self.copies.before_change()
        self._optimizer.step()
        self._done += 1
        if with_copies:
            self.copies.take(self._done)

    def close(self) -> None:
        """Ends all that runs."""
        self.copies.leave()
        self._session.close()


def measure(rank: int, store: str, options: argparse.Namespace) -> None:
    """Body of a rank; the first prints."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks
    )
    steps = Steps(options)
    for with_copies in (False, True, True):
        steps.run(with_copies)
    taken: dict[bool, list[list[float]]] = {True: [], False: []}
    begun = steps.begun
    for round_ in range(options.rounds):
        for with_copies in (round_ % 2 == 0, round_ % 2 == 1):
            dist.barrier()
            began_s, cpu_s = perf_counter(), process_time()
            for _ in range(options.steps):
                steps.run(with_copies)
            dist.barrier()
            clock_s = perf_counter() - began_s
            of_cpu = torch.tensor(process_time() - cpu_s, dtype=torch.float64)
            dist.all_reduce(of_cpu)
            times = [clock_s / options.steps, of_cpu.item() / options.steps]
            taken[with_copies].append(times)
    if rank == 0:
        show(taken, steps, begun, options)
    steps.close()


def show(taken: dict[bool, Any], steps: Steps, begun: int, options: argparse.Namespace) -> None:
    """Prints the medians."""
    shard_mb = steps.copies.num_bytes / 4e6
    sent = steps.begun - begun
    print(
        f"{options.ranks} ranks, a shard of {shard_mb:.2f} MB, {sent} of "
        f"{options.rounds * options.steps} versions sent"
    )
    for place, name in enumerate(("by the clock", "of the CPU, all ranks")):
        off, on = (median(one[place] for one in taken[kind]) for kind in (False, True))
        pairs = zip(taken[True], taken[False], strict=True)
        more = median(one[place] / other[place] - 1 for one, other in pairs)
        print(f"{name:<22} {off:.3f} s without, {on:.3f} s with copies, in pairs {more:+.2%}")


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3, help="of the lengths in the batch")
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile() as store:
        torch.multiprocessing.spawn(measure, (store.name, options), options.ranks)


if __name__ == "__main__":
    main()
