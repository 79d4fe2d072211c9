"""What attention costs beyond its kernels: our path against the plain call on the same tokens.

Prints Markdown tables. The first: forward and backward of one layer at degree 1, ours and plain in
turn, median of all pairs; the target is an overhead of at most 2%. The second: a ring's light group
against a communicator of its own, on two ranks that share the machine's GPU.

    python scripts/gpu/bench_attention.py [--device cpu|cuda] [--small] [--seconds LIMIT]
"""

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from common import Budget, machine, parse, row, seconds_of, table
from several_ranks import new_group_of_all, run

from megatron_hdp.runtime.attention import AttentionBackend, RunShapes, select_attention
from megatron_hdp.runtime.kernels import TorchFlashKernel
from megatron_hdp.runtime.ring import RingAttention, RingComm, RingGroup, TokenLayout

Plain = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


MIXES = {
    "1 x 64K": (65536,),
    "16 x 4K": (4096,) * 16,
    "512 x 128": (128,) * 512,
    "64K, mixed": (32768, 12288) + (2048,) * 4 + (1024,) * 8 + (256,) * 16,
}
"""Name -> lengths of the packed sequences."""
SMALL_MIXES = {
    "1 x 256": (256,),
    "4 x 64": (64,) * 4,
    "64 x 4": (4,) * 64,
    "256, mixed": (128, 64) + (8,) * 8,
}
MAX_PAIRS = 50
NUM_GROUPS = 4  # rings of each kind in the second table


def main() -> None:
    """Measures and prints."""
    options, budget = parse(__doc__.splitlines()[0])
    device = torch.device(options.device)
    shape = RunShapes(device, torch.bfloat16, 128, heads=32, kv_heads=8)
    if options.small:
        shape = RunShapes(device, torch.float32, 16, heads=4, kv_heads=2)
    mixes = SMALL_MIXES if options.small else MIXES
    print(f"{machine(options.device)}\n")
    print(
        f"{shape.heads} heads, {shape.kv_heads} of keys and values, of {shape.head_dim}, "
        f"{str(shape.dtype).removeprefix('torch.')}; forward and backward\n"
    )
    figures = _print_overheads(shape, mixes, budget, 0.3 * options.seconds)
    figures += _print_groups(options.device, max(20.0, budget.left_s))
    print(f"\nfigures: {'; '.join(figures)}")


def _print_overheads(
    shape: RunShapes, mixes: dict[str, tuple[int, ...]], budget: Budget, reserve_s: float
) -> list[str]:
    header = "attention|sequences|ours ms|plain ms|overhead|plain TFLOP/s|pairs"
    print(table(header.split("|")))
    contenders, refused = _contenders(shape)
    rows = [(backend, mix) for backend in contenders for mix in mixes]
    figures = []
    for number, (backend, mix) in enumerate(rows):
        seconds = (budget.left_s - reserve_s) / (len(rows) - number)
        cells = _cells(backend, shape, mixes[mix], seconds)
        print(row([backend.name, mix, *cells]), flush=True)
        figures.append(f"{backend.name}, {mix}: {cells[2] or cells[0]}")
    for name, why in refused.items():
        print(f"\n{name} is not to be had here: {why}")
    return figures


def _contenders(shape: RunShapes) -> tuple[list[AttentionBackend], dict[str, str]]:
    found, refused = [], {}
    for name in ("transformer-engine", "flash-attn", "torch"):
        try:
            found.append(select_attention(shape, name).backend)
        except ValueError as error:
            refused[name] = str(error).splitlines()[1].strip()
    return found, refused


def _cells(
    backend: AttentionBackend, shape: RunShapes, lengths: tuple[int, ...], seconds: float
) -> list[str]:
    try:
        ours, plain = _pairs(backend, shape, lengths, time.monotonic() + seconds)
    except torch.OutOfMemoryError:
        return ["out of memory", "", "", "", ""]
    overhead = median(a / b for a, b in zip(ours, plain, strict=True)) - 1
    # causal: half of the scores; backward has five products to forward's two
    flops = sum(3.5 * 4 * (n * n / 2) * shape.heads * shape.head_dim for n in lengths)
    rate = flops / (median(plain) * 1e-3) / 1e12
    times = f"{median(ours):.3f}", f"{median(plain):.3f}"
    return [*times, f"{overhead:+.1%}", f"{rate:.3g}", str(len(ours))]


def _pairs(
    backend: AttentionBackend, shape: RunShapes, lengths: tuple[int, ...], deadline: float
) -> tuple[list[float], list[float]]:
    """Milliseconds of ours and of plain, in turn; which goes first alternates."""
    *inputs, dout = shape.inputs(sum(lengths))
    layout = TokenLayout((0,), 0, (), lengths, shape.device)
    no_ring: Any = None
    scale = shape.head_dim**-0.5
    plain = _plain(backend, inputs, layout, scale)

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return backend(q, k, v, layout, no_ring, scale)

    times: dict[Plain, list[float]] = {ours: [], plain: []}
    for attend in (ours, plain, ours, plain):  # builds what is built at first use
        _milliseconds(attend, inputs, dout)
    while len(times[plain]) < MAX_PAIRS:
        pair = (ours, plain) if len(times[plain]) % 2 else (plain, ours)
        for attend in pair:
            times[attend].append(_milliseconds(attend, inputs, dout))
        if time.monotonic() > deadline and len(times[plain]) >= 3:
            break
    return times[ours], times[plain]


def _milliseconds(attend: Plain, inputs: list[torch.Tensor], dout: torch.Tensor) -> float:
    if dout.is_cuda:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        torch.autograd.grad(attend(*inputs).view_as(dout), inputs, dout)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))
    return 1e3 * seconds_of(
        lambda: torch.autograd.grad(attend(*inputs).view_as(dout), inputs, dout), "cpu"
    )


def _plain(
    backend: AttentionBackend, inputs: list[torch.Tensor], layout: TokenLayout, scale: float
) -> Plain:
    """The same tokens by the library's own call, with everything made beforehand."""
    offsets, longest = layout.local_segments.offsets, layout.local_segments.longest
    if not isinstance(backend, RingAttention):  # TransformerEngine's, with one more module of its
        where: dict[str, Any] = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
        where |= {"max_seqlen_q": longest, "max_seqlen_kv": longest}
        module = backend._module("plain", inputs, scale)
        return lambda q, k, v: module(q, k, v, **where)
    if isinstance(backend.kernel, TorchFlashKernel):
        return lambda q, k, v: _PlainTorchFlash.apply(q, k, v, offsets, longest, scale)
    if backend.name.startswith("flash-attn"):
        from flash_attn import flash_attn_varlen_func

        return lambda q, k, v: flash_attn_varlen_func(
            q, k, v, offsets, offsets, longest, longest, softmax_scale=scale, causal=True
        )
    return lambda q, k, v: _plain_sdpa(q, k, v, layout.segments, scale)


class _PlainTorchFlash(torch.autograd.Function):
    """PyTorch's kernels and nothing else."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, offsets: Any, longest: int, scale: float) -> Any:
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, offsets, offsets, longest, longest, 0.0, True, False, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, lse, offsets, state, unused)
        ctx.longest, ctx.scale = longest, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        q, k, v, out, lse, offsets, state, unused = ctx.saved_tensors
        where = offsets, offsets, ctx.longest, ctx.longest
        grads = torch.ops.aten._flash_attention_backward(
            *(dout, q, k, v, out, lse, *where, 0.0, True, state, unused), scale=ctx.scale
        )
        return *grads, None, None, None


def _plain_sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], scale: float
) -> torch.Tensor:
    outs = []
    for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        one_q, one_k, one_v = (x.transpose(0, 1)[None] for x in parts)
        out = torch.nn.functional.scaled_dot_product_attention(
            one_q, one_k, one_v, is_causal=True, scale=scale, enable_gqa=True
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def _print_groups(device_type: str, seconds: float) -> list[str]:
    print(f"\nGroup of a ring of 2, mean of {NUM_GROUPS}:\n")
    print(table(("group", "us to make", "us of its first hop", "MB on each rank")))
    kinds = ("light", "real")
    try:
        by_rank = run(2, group_costs, kinds, device_type, timeout_s=seconds)
    except RuntimeError as error:
        why = str(error).strip().splitlines()[-1]
        print(row([" and ".join(kinds), why, "", ""]))
        return [f"ring groups: {why}"]
    figures = []
    for kind, costs in zip(kinds, zip(*by_rank, strict=True), strict=True):
        make_us, hop_us, megabytes = (median(values) for values in zip(*costs, strict=True))
        print(row([kind, f"{make_us:,.0f}", f"{hop_us:,.0f}", f"{megabytes:.3f}"]))
        figures.append(f"{kind} group {make_us + hop_us:,.0f} us, {megabytes:.1f} MB")
    return figures


def group_costs(kinds: tuple[str, ...], device_type: str) -> list[tuple[float, ...]]:
    """Body of a rank: of one group of each kind, microseconds to make and to use it, and MB."""
    comm = RingComm(new_group_of_all(device_type))
    return [_group_cost(comm, kind, device_type) for kind in kinds]


def _group_cost(comm: RingComm, kind: str, device_type: str) -> tuple[float, ...]:
    rank = dist.get_rank()
    tensor = torch.zeros(8, device=device_type)
    comm.pass_on(tensor, (0, 1), rank).wait()
    before = _bytes_in_use(device_type)
    groups: list[Any] = []
    moments = [time.perf_counter()]
    for _ in range(NUM_GROUPS):
        if kind == "light":
            groups.append(RingGroup(comm, (0, 1)))
        else:
            backend = "nccl" if device_type == "cuda" else "gloo"
            groups.append(dist.new_group([0, 1], backend=backend))
        moments.append(time.perf_counter())
        received = torch.empty_like(tensor)
        operations = [
            dist.P2POp(dist.isend, tensor, 1 - rank, groups[-1]),
            dist.P2POp(dist.irecv, received, 1 - rank, groups[-1]),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if device_type == "cuda":
            torch.cuda.synchronize()
        moments.append(time.perf_counter())
    spans = [1e6 * (end - start) for start, end in pairwise(moments)]
    used = _bytes_in_use(device_type) - before
    # of a GPU that all ranks share the use by all of them is seen
    ranks_seen = dist.get_world_size() if device_type == "cuda" else 1
    return fmean(spans[::2]), fmean(spans[1::2]), used / 1e6 / NUM_GROUPS / ranks_seen


def _bytes_in_use(device_type: str) -> int:
    dist.barrier()
    if device_type == "cuda":
        free, total = torch.cuda.mem_get_info()
        return int(total - free)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


if __name__ == "__main__":
    main()
