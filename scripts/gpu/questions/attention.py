"""Attention: plans that are built, empty segments, rings' precision, short packs, copies."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import several_ranks
import torch
import torch.distributed as dist
from common import seconds_of

from megatron_hdp.runtime.attention import AttentionBackend, RunShapes, select_attention
from megatron_hdp.runtime.host_to_device import PackedArrays, with_arrays_ahead
from megatron_hdp.runtime.kernels import MatmulKernel, TorchFlashKernel
from megatron_hdp.runtime.ring import RingAttention, RingComm, TokenLayout
from questions import Answer, question

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
RING_SECONDS = 35  # both ranks import TransformerEngine
RING_CASES = {"empty": ((512, 256, 64), 1), "long": ((4096,), 5)}
RINGS = ("transformer-engine", "torch")
_TOO_OLD = Answer("not asked: this TransformerEngine is too old for rings, all are ours", True)


def _backend(name: str, comm: Any = None) -> AttentionBackend:
    shapes = RunShapes(torch.device("cuda"), torch.bfloat16, HEAD_DIM)
    return select_attention(shapes, name, comm).backend


def _inputs(num_tokens: int, heads: int = HEADS, kv_heads: int = KV_HEADS) -> list[torch.Tensor]:
    """Queries, keys and values that want gradients, and the gradient of the output."""
    kind = torch.device("cuda"), torch.bfloat16, HEAD_DIM
    return RunShapes(*kind, heads=heads, kv_heads=kv_heads).inputs(num_tokens)


def _results(
    attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor], layout: Any, comm: Any = None
) -> list[torch.Tensor]:
    """Output and gradients."""
    *leaves, dout = inputs
    out = attend(*leaves, layout, comm, HEAD_DIM**-0.5)
    return [out.detach(), *torch.autograd.grad(out.view_as(dout), leaves, dout)]


def _ms(run: Callable[[], object]) -> float:
    """Milliseconds until the GPU is done."""
    return 1e3 * seconds_of(run, "cuda")


@question(
    "9, then 10 sequences in TransformerEngine: plans built",
    "none for 10: it is as fast as the second time",
)
def _plans_by_number_of_sequences() -> Answer:
    attend = _backend("transformer-engine")
    inputs = _inputs(8192)

    def call_ms(num_sequences: int) -> float:
        first = 8192 - 128 * (num_sequences - 1)
        lengths = (first,) + (128,) * (num_sequences - 1)
        layout = TokenLayout((0,), 0, (), lengths, torch.device("cuda"))
        return _ms(lambda: _results(attend, inputs, layout))

    call_ms(1)  # loads what is loaded once
    nine, ten, again = (call_ms(n) for n in (9, 10, 10))
    found = f"9: {nine:.0f} ms, 10: {ten:.0f} ms, 10 again: {again:.0f} ms"
    return Answer(found, ten - again < 0.2 * max(nine - again, 5.0))


_SECOND_OF_A_CLASS = {  # lengths whose plans are made, then others for which none should be
    "sequences": ((7168, *(128,) * 8), (7040, *(128,) * 9)),
    "tokens": ((5000, 1000), (5000, 1500)),
    "longest": ((2100, 1900, 1000), (2500, 1500, 1000)),
}


@question(
    "host's time for the second micro-batch of a class in TransformerEngine",
    "below 20 ms: sequences, tokens and the longest may differ",
)
def _second_of_a_class() -> Answer:
    attend, found = _backend("transformer-engine"), {}

    def host_ms(lengths: tuple[int, ...]) -> float:
        layout = TokenLayout((0,), 0, (), lengths, torch.device("cuda"))
        inputs = _inputs(sum(lengths))
        torch.cuda.synchronize()
        began = time.perf_counter()
        _results(attend, inputs, layout)
        span = 1e3 * (time.perf_counter() - began)
        torch.cuda.synchronize()
        return span

    for what, (first, second) in _SECOND_OF_A_CLASS.items():
        found[what] = host_ms(first), host_ms(second)
    told = ", ".join(f"{what} {ms:.0f} ms after {made:.0f}" for what, (made, ms) in found.items())
    return Answer(told, all(ms < 20 for _, ms in found.values()))


@question("price of empty sequences in TransformerEngine, 65 made up to 128", "less than 5 %")
def _price_of_empty_sequences() -> Answer:
    """The pack to which most empty ones are added, with them and without."""
    attend, lengths = _backend("transformer-engine"), (8192,) + (896,) * 64
    inputs, device = _inputs(sum(lengths)), torch.device("cuda")
    bucketed, exact = (TokenLayout((0,), 0, (), lengths, device) for _ in range(2))
    segments = exact.local_segments
    exact.__dict__["local_segments"] = replace(segments, bucketed_offsets=segments.offsets)
    times: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(7):
        for name, layout in (("with", bucketed), ("without", exact)):
            times[name].append(_ms(lambda layout=layout: _results(attend, inputs, layout)))
    with_ms, without_ms = (median(found[2:]) for found in times.values())
    found = f"65: {without_ms:.2f} ms, and 63 empty ones: {with_ms:.2f} ms"
    return Answer(found, with_ms < 1.05 * without_ms)


def fastest(lengths: tuple[int, ...]) -> tuple[str, str]:
    """Which attention is the fastest for these sequences; what each takes."""
    layout = TokenLayout((0,), 0, (), lengths, torch.device("cuda"))
    inputs, taken = _inputs(sum(lengths)), {}
    for name in ("transformer-engine", "flash-attn", "torch"):
        try:
            attend = _backend(name)
        except ValueError:  # not installed, or not for this GPU
            continue
        spans = [_ms(lambda a=attend: _results(a, inputs, layout)) for _ in range(7)]
        taken[name] = median(spans[2:])
    described = ", ".join(f"{name} {span:.2f} ms" for name, span in taken.items())
    return min(taken, key=taken.__getitem__), described


@question(
    "fastest attention for 512 sequences of 128 tokens",
    "a varlen flash kernel: cuDNN plans for 512 of the longest that may come",
)
def _kernel_of_short_packs() -> Answer:
    name, found = fastest((128,) * 512)
    return Answer(found, name != "transformer-engine")


@question("fastest attention for 16 sequences of 4,096 tokens", "TransformerEngine with cuDNN")
def _kernel_of_medium_packs() -> Answer:
    name, found = fastest((4096,) * 16)
    return Answer(found, name == "transformer-engine")


@question(
    "our own kernels for 16 sequences of 4,096 tokens: FlashAttention 2, and 3 or 4",
    "the newer are faster where their package is",
)
def _newer_flash_attention() -> Answer:
    layout = TokenLayout((0,), 0, (), (4096,) * 16, torch.device("cuda"))
    inputs, taken, refused = _inputs(16 * 4096), {}, []
    for newer in (None, "FA3", "FA4"):
        try:
            attend = RingAttention(TorchFlashKernel(newer))
            spans = [_ms(lambda a=attend: _results(a, inputs, layout)) for _ in range(7)]
            taken[newer or "FA2"] = median(spans[2:])
        except Exception as error:  # not there, or not for this GPU
            refused.append(f"{newer}: {type(error).__name__}")
        finally:
            TorchFlashKernel.restore()
    told = ", ".join([*(f"{name} {span:.2f} ms" for name, span in taken.items()), *refused])
    return Answer(told, min(taken, key=taken.__getitem__) != "FA2" or len(taken) == 1)


@question("does the GPU wait for the next micro-batch's arrays", "no: less than a fifth of a copy")
def _copies_beside_compute() -> Answer:
    """Arrays of 64 MB for each of 4 steps of 0.1 s: how long the GPU waits for the next ones."""
    device, stream = torch.device("cuda"), torch.cuda.Stream()
    arrays = {"tokens": np.arange(8 * 2**20)}
    packed = PackedArrays(arrays, pin=True)
    alone = min(_ms(lambda: packed.buffer.to(device, non_blocking=True)) for _ in range(3))
    cycles = int(1e9 / _ms(lambda: torch.cuda._sleep(10**7)))  # of 0.1 s
    gaps = []
    for _ in range(2):  # the first makes page-locked memory
        marks = []
        for _item, _tensors in with_arrays_ahead(range(4), lambda item: arrays, device, stream):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            torch.cuda._sleep(cycles)
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize()
        gaps = [before[1].elapsed_time(after[0]) for before, after in pairwise(marks)]
    found = f"waits at most {max(gaps):.2f} ms; a copy alone {alone:.2f} ms"
    return Answer(found, max(gaps) < 0.2 * alone)


def rings_of_two() -> dict[str, dict[str, tuple[list[float], float]]]:
    """Body of a rank: of each case and ring, errors of (out, dq, dk, dv) and milliseconds."""
    comm = RingComm(several_ranks.new_group_of_all("cuda"))
    found = {name: _backend(name, comm) for name in RINGS}
    backends = {name: one for name, one in found.items() if getattr(one, "takes_rings", True)}
    return {case: _ring_results(backends, comm, *how) for case, how in RING_CASES.items()}


def _ring_results(
    backends: dict[str, AttentionBackend], comm: Any, slices: tuple[int, ...], times: int
) -> dict[str, tuple[list[float], float]]:
    layout = TokenLayout((0, 1), dist.get_rank(), slices, (), torch.device("cuda"))
    inputs = _inputs(layout.num_tokens, heads=8, kv_heads=2)
    wide = [x.detach().float().requires_grad_(x.requires_grad) for x in inputs]
    expected = _results(RingAttention(MatmulKernel()), wide, layout, comm)
    found = {}
    for name, attend in backends.items():
        results = _results(attend, inputs, layout, comm)
        errors = [
            float((one - wanted).norm() / wanted.norm())
            for one, wanted in zip(results, expected, strict=True)
        ]
        spans = [_ms(lambda a=attend: _results(a, inputs, layout, comm)) for _ in range(times)]
        found[name] = errors, median(spans)
    return found


@cache
def _rings() -> list[dict[str, dict[str, tuple[list[float], float]]]]:
    """Both cases by rank, on two ranks that share the GPU."""
    return several_ranks.run(2, rings_of_two, timeout_s=RING_SECONDS)


@question(
    "TransformerEngine's ring of 2 with 3 sequences and 5 empty ones",
    "errors below 2 %, as without empty ones",
)
def _empty_segments_in_a_ring() -> Answer:
    if RINGS[0] not in _rings()[0]["empty"]:
        return _TOO_OLD
    worst = max(max(found["empty"]["transformer-engine"][0]) for found in _rings())
    return Answer(f"largest error {worst:.2%}", worst < 0.02)


@question(
    "ring of 2, TransformerEngine's and ours: error and time on one GPU",
    "both below 1 %, within a factor of 2",
)
def _precision_and_time_of_rings() -> Answer:
    """Both rings at degree 2 with one sequence, on ranks that share the GPU."""
    of_ranks = [found["long"] for found in _rings()]
    if RINGS[0] not in of_ranks[0]:
        return _TOO_OLD
    worst = {name: max(max(found[name][0]) for found in of_ranks) for name in RINGS}
    spent = {name: max(found[name][1] for found in of_ranks) for name in RINGS}
    told = ", ".join(f"{name} {worst[name]:.2%} in {spent[name]:.1f} ms" for name in RINGS)
    theirs, ours = (worst[name] for name in RINGS)
    return Answer(told, ours < 0.01 and theirs < 0.01 and 0.5 < theirs / ours < 2)
