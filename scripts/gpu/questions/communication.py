"""Of messages: who waits for whom on a GPU. Two ranks share the one there is."""

import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import seconds_of
from several_ranks import new_group_of_all, one_gpu_environment, run

from megatron_hdp.runtime.attention import RunShapes, select_attention
from megatron_hdp.runtime.epochs import nccl
from megatron_hdp.runtime.ring import RingComm, TokenLayout, new_ring_group
from questions import Answer, question

_LATE_S = 2.0
_LIMIT_S = 16.0  # of each pair of ranks; there are six, and a seventh on two GPUs
_CHANNELS = re.compile(r"(\d+) p2p channels, (\d+) p2p channels per peer")


@cache
def _messages() -> dict[str, Any]:
    """What rank 0 of two found."""
    found: dict[str, Any] = run(2, message_times, timeout_s=_LIMIT_S)[0]
    return found


@question("first message of a ring", "no longer than ten later ones")
def _first_message() -> Answer:
    """Whether neighbours are connected, and the options of the communicator taken, at start."""
    first_ms, later_ms, is_urgent = (_messages()[key] for key in ("first", "later", "urgent"))
    found = f"first {first_ms:.1f} ms, later {later_ms:.1f} ms, priority {is_urgent}"
    return Answer(found, bool(is_urgent) and first_ms < 10 * later_ms)


@question("host's time for a hop of a ring, beside PyTorch's batch alone", "at most 20 us more")
def _host_of_a_hop() -> Answer:
    ours_us, bare_us = _messages()["ours_us"], _messages()["bare_us"]
    return Answer(f"{ours_us:.0f} us, alone {bare_us:.0f} us", ours_us < bare_us + 20)


def message_times() -> dict[str, Any]:
    """Body of a rank: of the first message of a ring and later ones, and the host's for a hop."""
    group, rank = new_group_of_all("cuda"), dist.get_rank()
    comm, tensor = RingComm(group), torch.zeros(1 << 20, device="cuda")
    message = partial(comm.pass_on, tensor, (0, 1), rank)
    times = [1e3 * seconds_of(lambda: message().wait(), "cuda") for _ in range(6)]
    options = group._get_backend(torch.device("cuda")).options
    sent, received = torch.zeros(2, 256, device="cuda").unbind()

    def bare() -> None:
        kinds = ((dist.isend, sent), (dist.irecv, received))
        batch = [dist.P2POp(kind, x, group=group, group_peer=1 - rank) for kind, x in kinds]
        for work in dist.batch_isend_irecv(batch):
            work.wait()

    return {
        "first": times[0],
        "later": max(times[1:]),
        "urgent": options.is_high_priority_stream,
        "ours_us": _host_us(lambda: comm.pass_on(sent, (0, 1), rank, into=received).wait()),
        "bare_us": _host_us(bare),
    }


def _host_us(hop: Callable[[], object], number: int = 100) -> float:
    """Microseconds of the host for a hop, while the GPU may be behind."""
    found = []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(number):
            hop()
        found.append(1e6 * (time.perf_counter() - began) / number)
    torch.cuda.synchronize()
    return min(found)


@question(
    "memory freed and not reusable while the host is 16 layers ahead of a ring, and retries",
    "below 64 MB, none",
)
def _buffers_of_a_ring() -> Answer:
    """Whether buffers of hops wait for NCCL's stream before they are used again."""
    waiting, retries = run(2, ring_ahead_of_the_gpu, timeout_s=_LIMIT_S)[0]
    return Answer(f"{waiting / 1e6:.0f} MB, {retries} retries", waiting < 64e6 and not retries)


def ring_ahead_of_the_gpu() -> tuple[int, int]:
    """Body of a rank: bytes that wait at most, and how often the allocator gave all back."""
    device, tokens = torch.device("cuda", 0), 8192  # 8 MB of keys and values
    comm = RingComm(new_group_of_all("cuda"))
    shapes = RunShapes(device, torch.bfloat16, 128, heads=8, kv_heads=2)
    attend = select_attention(shapes, "torch", comm).backend
    layout = TokenLayout((0, 1), dist.get_rank(), (tokens,), (), device)
    *leaves, _ = shapes.inputs(tokens)

    def layers(number: int) -> None:
        outs = [attend(*leaves, layout, comm, 128**-0.5) for _ in range(number)]
        torch.autograd.grad(torch.stack(outs).sum(), leaves)

    layers(1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda._sleep(2 * 10**9)  # about a second: launches go on
    layers(16)
    torch.cuda.synchronize()
    found = torch.cuda.memory_stats()
    waiting = found["active_bytes.all.peak"] - found["allocated_bytes.all.peak"]
    return waiting, found["num_alloc_retries"]


@cache
def _wide_rings() -> tuple[str, list[tuple[str, str]], float]:
    """Of two ranks that say they are two nodes: what is asked for, channels, bytes of each."""
    with tempfile.TemporaryDirectory() as folder:
        (asked_for, held), _ = run(2, make_wide_rings, folder, timeout_s=_LIMIT_S)
        logs = "".join(path.read_text() for path in Path(folder).iterdir())
    return asked_for, _CHANNELS.findall(logs), held


@question(
    "channels that two ranks of the rings' communicator share, by NCCL's log",
    "4, or all that it has, where torch lets us ask: 2.13 and newer",
)
def _channels() -> Answer:
    asked_for, found, _ = _wide_rings()
    told = ", ".join(f"{pair} of {all_of_them}" for all_of_them, pair in found)
    is_wide = bool(found) and all(int(a) >= min(4, int(n)) for n, a in found)
    is_asked = not asked_for.startswith("NCCL's own number")
    return Answer(f"{told} ({asked_for})", is_wide if is_asked else bool(found))


@question(
    "memory of CUDA, with all kernels loaded, and of one communicator of NCCL's",
    "below 2.4 GB",
)
def _memory_beside_pytorch() -> Answer:
    _, _, held = _wide_rings()
    return Answer(f"{held / 1e9:.2f} GB", held < 2.4e9)


def make_wide_rings(folder: str) -> tuple[str, float]:
    """Body of a rank: the communicator as a run makes it, with NCCL's log, and bytes it holds."""
    log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": f"{folder}/%p"}
    os.environ.update(one_gpu_environment(dist.get_rank()) | log, CUDA_MODULE_LOADING="EAGER")
    del os.environ["NCCL_MAX_CTAS"]  # the cap that these ranks have otherwise
    torch.cuda.set_device(0)
    everyone, timeout = [list(range(dist.get_world_size()))], timedelta(seconds=_LIMIT_S)
    device = torch.device("cuda", 0)
    told: list[str] = []
    new_ring_group(everyone, timeout, device, max_ctas=16, backend="nccl", tell=told.append)
    torch.cuda.synchronize()
    dist.barrier()  # gloo's: both hold what they hold
    free, total = torch.cuda.mem_get_info()
    dist.barrier()
    held = (total - free) / dist.get_world_size() - torch.cuda.memory_reserved()
    return told[0].removeprefix("rings' communicator: "), held


@cache
def _early() -> tuple[float, float, float]:
    """What rank 0 of two found, which reduces before the other one."""
    found: tuple[float, float, float] = run(2, one_reduces_early, "nothing", timeout_s=_LIMIT_S)[0]
    return found


@question("the first reduction of a communicator, to which a rank comes late", "the host waits")
def _a_first_reduction() -> Answer:
    """Whether NCCL connects ranks inside of the call: why no rank may wait for this one then."""
    first_s, *_ = _early()
    return Answer(f"returns after {first_s:.2f} s", first_s > 0.5 * _LATE_S)


@question("a ring's message beside a reduction that waits", "passes at once")
def _a_ring_beside_a_reduction() -> Answer:
    """Whether messages pass while a reduction waits for a rank that has not begun it."""
    _, sent_s, _ = _early()
    return Answer(f"after {sent_s:.2f} s", sent_s < 0.5 * _LATE_S)


@question("memory given back beside a reduction that waits", f"waits for it, {_LATE_S:.0f} s")
def _a_driver_beside_a_reduction() -> Answer:
    """Whether giving memory back to the driver waits for that reduction: why the rule is there."""
    (_, _, freed_s), _ = run(2, one_reduces_early, "free", timeout_s=_LIMIT_S)
    return Answer(f"after {freed_s:.2f} s", freed_s > 0.5 * _LATE_S)


def one_reduces_early(then: str) -> tuple[float, float, float]:
    """Body of a rank: seconds of the first reduction's call, of a message, of memory.

    The first one comes late on rank 1. The later ones are measured from before rank 0 begins to
    reduce, which it does long before rank 1.
    """
    rings, reductions = RingComm(new_group_of_all("cuda")), new_group_of_all("cuda")
    tensor, block = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 28, device="cuda")
    rank, current = dist.get_rank(), torch.cuda.current_stream()
    torch.cuda.synchronize()
    dist.barrier()
    time.sleep(rank * _LATE_S)
    started = time.perf_counter()
    dist.all_reduce(tensor.clone(), group=reductions, async_op=True).wait()
    first_s = time.perf_counter() - started
    torch.cuda.synchronize()
    dist.barrier()
    started = time.perf_counter()
    if rank == 0:
        reduction = dist.all_reduce(tensor.clone(), group=reductions, async_op=True)
    rings.pass_on(tensor, (0, 1), rank).wait()
    current.synchronize()
    sent_s = time.perf_counter() - started
    del block
    if rank == 0 and then == "free":
        torch.cuda.empty_cache()
    freed_s = time.perf_counter() - started
    if rank == 1:
        time.sleep(_LATE_S)
        reduction = dist.all_reduce(tensor.clone(), group=reductions, async_op=True)
    reduction.wait()
    torch.cuda.synchronize()
    return first_s, sent_s, freed_s


@cache
def _aborted() -> dict[str, Any]:
    """What rank 0 of two found, which waits for the other one in vain."""
    found: dict[str, Any] = run(2, aborted_in_two_waits, timeout_s=_LIMIT_S)[0]
    return found


@question(
    "two communicators that wait for a rank, aborted together: until the host's wait ends",
    "below 1 s, without an error",
)
def _abort() -> Answer:
    """How a rank leaves a step in which another one has died."""
    all_ended, seconds, error = (_aborted()[key] for key in ("ended", "seconds", "error"))
    found = f"{seconds:.2f} s, {error or 'no error'}, all aborts ended: {all_ended}"
    return Answer(found, bool(all_ended) and not error and seconds < 1)


@question("the process behind those aborts: its watchdog, a new communicator", "it lives, sums")
def _behind_an_abort() -> Answer:
    """Whether the rank may go on: nothing ends the process, and it can make groups anew."""
    told, total = _aborted()["later"], _aborted()["sum"]
    return Answer(f"an aborted one says: {told}; a new one sums 1 to {total:g}", total == 1)


def aborted_in_two_waits() -> dict[str, Any]:
    """Body of a rank: what aborts do to rank 0, which waits for rank 1 in both communicators."""
    nccl.prepare()
    groups, tensor = [new_group_of_all("cuda") for _ in range(2)], torch.ones(1 << 20).cuda()
    for group in groups:
        dist.all_reduce(tensor.clone(), group=group)
    torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() == 1:
        return {}  # never comes
    found: dict[str, Any] = {"error": None, "later": "nothing"}

    def abort() -> None:
        time.sleep(0.5)
        found["began"] = time.perf_counter()
        found["ended"] = nccl.Communicators().abort()

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        for group in groups:
            dist.all_reduce(tensor.clone(), group=group, async_op=True)
        torch.cuda.synchronize()
    except RuntimeError as error:
        found["error"] = str(error)
    found["seconds"] = time.perf_counter() - found["began"]
    thread.join()
    time.sleep(1.0)  # PyTorch's watchdog looks ten times a second
    try:
        dist.all_reduce(tensor, group=groups[0])
    except RuntimeError as error:
        found["later"] = type(error).__name__
    alone = dist.new_group([0], backend="nccl", use_local_synchronization=True)
    ones = torch.ones(1, device="cuda")
    dist.all_reduce(ones, group=alone)
    return found | {"sum": ones.item()}


@question(
    "DeepEP beside unequal numbers of tokens, forward and backward, on two GPUs",
    "each token comes back as it left",
)
def _deep_ep() -> Answer:
    if find_spec("deep_ep") is None or torch.cuda.device_count() < 2:
        return Answer("not asked: it needs the package deep_ep and two GPUs", True)
    by_rank = run(2, tokens_by_deep_ep, timeout_s=_LIMIT_S)
    errors = ", ".join(f"{out:.1g} and {back:.1g}" for out, back in by_rank)
    return Answer(f"errors {errors}", not any(map(any, by_rank)))


def tokens_by_deep_ep() -> tuple[float, float]:
    """Body of a rank: errors of tokens that one expert of four each has seen, and of gradients."""
    from megatron.core.transformer.moe.fused_a2a import fused_combine, fused_dispatch

    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    number = (300, 37)[rank]
    tokens = torch.randn(number, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    experts = torch.randint(4, (number, 1), device="cuda")
    shares = torch.ones(number, 1, device="cuda")
    arrived, _, _, _, handle = fused_dispatch(tokens, experts, shares, 4, dist.group.WORLD)
    out, _ = fused_combine(arrived, dist.group.WORLD, handle)
    out.sum().backward()
    return float((out - tokens).abs().max()), float((tokens.grad - 1).abs().max())
