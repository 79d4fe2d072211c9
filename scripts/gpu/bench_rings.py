"""Rings on several GPUs: bandwidth by degree, beside what the cost model assumes.

    python scripts/gpu/bench_rings.py                  on all GPUs of this machine
    torchrun --nnodes 2 --nproc-per-node 8 ... scripts/gpu/bench_rings.py

All rings of a degree send at a time, as in a run. Below the table: the channels of a pair by NCCL's
log, and the memory that CUDA and NCCL hold beside PyTorch's.
"""

import os
import re
import tempfile
from datetime import timedelta
from pathlib import Path
from time import perf_counter

import several_ranks
import torch
import torch.distributed as dist
from common import Budget, machine, parse, seconds_of, table

from megatron_hdp.options.hdp import HdpOptions
from megatron_hdp.planner import CostModel
from megatron_hdp.runtime.ring import RingComm, new_ring_group

MIB = 2**20
HOPS = 16
HEADER = ("degree", "MiB a hop", "GB/s each way", "assumed", "us a hop", "of these the host's")
PER_PEER = re.compile(r"(\d+) p2p channels per peer")


def rows_and_figures(device_type: str, seconds: float) -> tuple[list[list[str]], str]:
    """Body of a rank: the table's rows, and what is said below it."""
    budget, rank, num_ranks = Budget(seconds), dist.get_rank(), dist.get_world_size()
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    device = torch.device("cpu") if device_type == "cpu" else torch.device("cuda", local_rank)
    comm, figures = _comm(device)
    rows, best = [], "nothing measured"
    for degree in [n for n in range(2, num_ranks + 1) if num_ranks % n == 0]:
        is_inside = degree <= ranks_per_node
        model = CostModel.intra_node_bytes_per_s if is_inside else CostModel.inter_node_bytes_per_s
        for size in (MIB, 16 * MIB) if device_type == "cpu" else (MIB, 16 * MIB, 128 * MIB):
            if _any_rank(budget.left_s < 0):
                rows.append([f"{degree}", f"{size // MIB}", "no time left", "", "", ""])
                continue
            hop_s, host_s = _hop(comm, degree, size, device)
            found = size / hop_s / 1e9, model / 1e9, 1e6 * hop_s, 1e6 * host_s
            rows.append([f"{degree}", f"{size // MIB}", *(f"{one:,.1f}" for one in found)])
            best = f"ring of {degree} at {rows[-1][2]} GB/s"
    if device_type == "cuda":
        free, total = torch.cuda.mem_get_info()
        held = (total - free - torch.cuda.memory_reserved()) / 1e9
        figures += f", CUDA and NCCL hold {held:.2f} GB"
    return rows, f"{num_ranks} ranks, {best}{figures}"


def _comm(device: torch.device) -> tuple[RingComm, str]:
    """The rings' communicator as a run makes it, and what its log says of channels."""
    everyone, timeout = [list(range(dist.get_world_size()))], timedelta(seconds=60)
    if device.type == "cpu":
        return RingComm(new_ring_group(everyone, timeout)), ""
    torch.cuda.set_device(device)
    max_ctas = HdpOptions(hdp_tokens_per_rank=1).hdp_ring_max_ctas
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "nccl.log")
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT", NCCL_DEBUG_FILE=str(log))
        said: list[str] = []
        group = new_ring_group(everyone, timeout, device, max_ctas, "nccl", said.append)
        channels = PER_PEER.findall(log.read_text()) if log.exists() else []
    return RingComm(group), f", channels a pair {channels} ({' '.join(said)})"


def _hop(comm: RingComm, degree: int, size: int, device: torch.device) -> tuple[float, float]:
    """Seconds of a hop, and the host's for it: the slowest rank's."""
    rank = dist.get_rank()
    index, first = rank % degree, rank // degree * degree
    ring = tuple(range(first, first + degree))
    sent, spare = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    host_s = 0.0

    def run() -> None:
        nonlocal sent, spare, host_s
        began = perf_counter()
        for _ in range(HOPS):
            sent, spare = comm.pass_on(sent, ring, index, into=spare).wait(), sent
        host_s = perf_counter() - began

    run()
    dist.barrier()
    spans = torch.tensor([seconds_of(run, device.type), host_s])
    dist.all_reduce(spans, dist.ReduceOp.MAX)
    hop_s, host_hop_s = (spans / HOPS).tolist()
    return hop_s, host_hop_s


def _any_rank(says_so: bool) -> bool:
    found = torch.tensor(int(says_so))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


def main() -> None:
    """Measures and prints."""
    options, budget = parse(__doc__)
    if "RANK" in os.environ:  # torchrun's
        dist.init_process_group("gloo", timeout=timedelta(seconds=options.seconds))
        found, rank = rows_and_figures(options.device, options.seconds), dist.get_rank()
        dist.destroy_process_group()
    else:
        num_ranks = 2 if options.device == "cpu" else torch.cuda.device_count()
        if num_ranks < 2:
            print("figures: one GPU here, and rings need two: nothing measured")
            return
        asked = options.device, max(5.0, budget.left_s - 20)
        found, rank = (
            several_ranks.run(num_ranks, rows_and_figures, *asked, timeout_s=budget.left_s)[0],
            0,
        )
    if rank == 0:
        rows, figures = found
        print(machine(options.device) + "\n")
        print(table(HEADER, rows))
        print(f"figures: {figures}")


if __name__ == "__main__":
    main()
