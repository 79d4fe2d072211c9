"""A part's pass around a ring of two ranks: its keys travel, or its queries, side by side.

Forward and backward of the attention of one part whose earlier parts are there, in float32 on a
CPU, a thread a rank. Run: ``python scripts/benchmarks/bench_parts.py``.
"""

import tempfile
from statistics import median
from time import perf_counter
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing

from megatron_hdp.planner.parts import queries_travel
from megatron_hdp.planner.query_ratio import query_ratio_of
from megatron_hdp.runtime.kernels import CpuFlashKernel
from megatron_hdp.runtime.ring import (
    EarlierKeys,
    RingAttention,
    RingComm,
    new_ring_group,
    part_layouts,
)

RANKS, TOKENS, ROUNDS, HEADS, HEAD_DIM = 2, 512, 7, 8, 64
KV_HEADS, EARLIER = (8, 1), (0, 1, 3, 7)  # of keys; parts before


def ran(kv_heads: int, earlier: int, comm: RingComm, is_queries: bool) -> tuple[float, int]:
    """Seconds and bytes of the last of some equal parts, forward and backward."""
    ring, attend, keys = tuple(range(RANKS)), RingAttention(CpuFlashKernel()), EarlierKeys()
    told = [((TOKENS,), (), number > 0, False, 0) for number in range(earlier + 1)]
    layouts = part_layouts(ring, comm.group.rank(), told, torch.device("cpu"))
    shapes = [(TOKENS, heads, HEAD_DIM) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    q, k, v, dout = (torch.randn(shape) for shape in shapes)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    for layout in layouts[:-1]:
        keys.keep(layout, k, v)
    comm.bytes_sent = 0
    dist.barrier()
    began_s = perf_counter()
    with mock.patch("megatron_hdp.runtime.ring.dense.queries_travel", lambda *_: is_queries):
        attend(*inputs, layouts[-1], comm, HEAD_DIM**-0.5, earlier=keys).backward(dout)
    dist.barrier()
    return perf_counter() - began_s, comm.bytes_sent


def measure(rank: int, store: str) -> None:
    """Body of a rank; the first prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    comm = RingComm(new_ring_group([list(range(RANKS))]))
    for kv_heads in KV_HEADS:
        ratio = query_ratio_of(2 * kv_heads * HEAD_DIM, *2 * [HEADS * HEAD_DIM], HEADS, 4)
        for earlier in EARLIER:
            pairs = [
                [ran(kv_heads, earlier, comm, is_queries) for is_queries in (False, True)]
                for _ in range(ROUNDS + 1)
            ][1:]
            keys, queries = zip(*pairs, strict=True)
            taken = median(b[0] / a[0] for a, b in pairs)
            rule = "queries" if queries_travel(TOKENS, earlier * TOKENS, ratio) else "keys"
            if rank == 0:
                print(
                    f"{HEADS} heads, {kv_heads} of keys, {earlier} parts before: "
                    f"{keys[0][1] / 1e6:6.2f} and {queries[0][1] / 1e6:6.2f} MB, "
                    f"{median(a[0] for a in keys) * 1e3:6.1f} ms by keys; "
                    f"queries / keys {taken:.2f} of the time; the rule: {rule}",
                    flush=True,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (f"{folder}/store",), RANKS)
