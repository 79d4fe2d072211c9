"""Memory of a GPU and of its host, and what other threads may ask while the device is busy."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
from common import seconds_of

from megatron_hdp.runtime.clocks import DriverQuery, clock_of
from megatron_hdp.runtime.cuda import numa, pci_address, settings
from megatron_hdp.runtime.offload import ActivationOffload
from megatron_hdp.runtime.timeline import RING_WAIT, Timeline
from questions import Answer, question

ROOT = Path(__file__).parents[3]
_GIB = 2**30
_SLEEP_CYCLES = 3_000_000_000  # one and a half to two seconds
_PREPARE = """
import os, time
from megatron_hdp.runtime import cuda
doubts = cuda.prepare(cuda.Run(capability=cuda.compute_capability(), hybrid_data_parallel=True))
assert not doubts, doubts
"""
_SHAPES = """
import random, torch
draw = random.Random(0)
for _ in range(50):
    held = []
    tokens = draw.randint(1000, 30_000)
    for _ in range(40):
        held.append(torch.empty(tokens * draw.choice((2048, 8192, 22528)), dtype=torch.uint8,
                                device="cuda"))
        if draw.random() < 0.3:
            held.pop(draw.randrange(len(held)))
    del held
peak = torch.cuda.max_memory_allocated()
segments = torch.cuda.memory_snapshot()
expandable = all(one["is_expandable"] for one in segments)
print(torch.cuda.max_memory_reserved() / peak, expandable)
"""
_START = """
begun = time.monotonic()
import torch
torch.ones(1, device="cuda").sum().item()
from megatron_hdp.runtime.cuda.device import loading_mode
free, total = torch.cuda.mem_get_info()
print(loading_mode(), total - free, time.monotonic() - begun)
"""


_SAVE = """
import pickle, subprocess, sys, torch
from megatron_hdp.megatron.checkpoint.staging import Staged
staged = Staged([torch.arange(1 << 20, device="cuda")])
read = "import pickle, sys, torch; (x,) = pickle.load(sys.stdin.buffer); "
read += "print(x.device.type, int(x.sum()) == (1 << 19) * ((1 << 20) - 1))"
sent = pickle.dumps(staged)
found = subprocess.run([sys.executable, "-c", read], input=sent, capture_output=True, check=True)
print(found.stdout.decode())
"""
_WITHOUT_PTRACE = ("setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace")


def _process(code: str, *before: str, **variables: str) -> list[str]:
    """What a process of its own prints: CUDA reads its settings once."""
    names = (settings.MEMORY, settings.OTHER_MEMORY, settings.MODULES, settings.CONNECTIONS)
    there = {name: value for name, value in os.environ.items() if name not in names}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    outcome = subprocess.run(
        [*before, sys.executable, "-c", code],
        env={**there, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=90,
    )
    if outcome.returncode:
        raise RuntimeError((outcome.stderr.strip().splitlines() or ["no word"])[-1])
    return outcome.stdout.split()


@cache
def _shapes_in_growing_segments() -> list[str]:
    return _process(_PREPARE + _SHAPES)


@question("do segments grow, set before and after torch's import", "both")
def _segments_grow() -> Answer:
    by_variable = _shapes_in_growing_segments()[1]
    told_late = _process("import torch\n" + _PREPARE + _SHAPES)[1]
    return Answer(f"{by_variable}, told late {told_late}", by_variable == told_late == "True")


@question("reserved memory after 50 micro-batches of random sizes", "less")
def _fragments() -> Answer:
    default, growing = float(_process(_SHAPES)[0]), float(_shapes_in_growing_segments()[0])
    found = f"reserved {growing:.2f} of what is used at most, by default {default:.2f}"
    return Answer(found, growing < default and growing < 1.1)


@question("a save's tensors for its writer, segments growing, without SYS_PTRACE", "the same")
def _asynchronous_save() -> Answer:
    is_root = os.geteuid() == 0  # others have no SYS_PTRACE to drop
    found = _process(_PREPARE + _SAVE, *(_WITHOUT_PTRACE if is_root else ()))
    return Answer(" ".join(found), found == ["cpu", "True"])


@question("CUDA_MODULE_LOADING in effect; memory and time at start", "eager")
def _modules() -> Answer:
    mode, held, seconds = map(float, _process(_PREPARE + _START))
    lazy, lazy_held, lazy_s = map(float, _process("import time\n" + _START))
    found = (
        f"mode {mode:.0f}, {held / 1e9:.2f} GB, {seconds:.1f} s; else mode {lazy:.0f}, "
        f"{lazy_held / 1e9:.2f} GB, {lazy_s:.1f} s"
    )
    return Answer(found, mode == 1 and lazy == 2 and held < 3e9)


@question("pinning 1 GiB: time; does it wait for the device", "50 to 2000 ms; no")
def _pinning() -> Answer:
    torch.cuda.synchronize()
    begun = time.monotonic()
    idle = torch.empty(_GIB, dtype=torch.uint8, pin_memory=True)
    idle_ms = (time.monotonic() - begun) * 1e3
    torch.cuda._sleep(_SLEEP_CYCLES)
    done = torch.cuda.Event()
    done.record()
    begun = time.monotonic()
    busy = torch.empty(_GIB, dtype=torch.uint8, pin_memory=True)
    busy_ms, waited = (time.monotonic() - begun) * 1e3, done.query()
    torch.cuda.synchronize()
    del idle, busy
    found = f"{idle_ms:.0f} ms; beside a kernel {busy_ms:.0f} ms, which it outlasts: {waited}"
    return Answer(found, 50 < idle_ms < 2000 and not waited)


@question("is memory of a second stream lost to the main one", "yes")
def _second_pool() -> Answer:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, second = torch.cuda.memory_reserved(), torch.cuda.Stream()
    with torch.cuda.stream(second):
        beside = torch.empty(_GIB, dtype=torch.uint8, device="cuda")
    del beside
    torch.cuda.synchronize()
    main = torch.empty(_GIB, dtype=torch.uint8, device="cuda")
    reserved = (torch.cuda.memory_reserved() - before) / _GIB
    del main
    torch.cuda.empty_cache()
    return Answer(f"{reserved:.1f} GiB reserved for 1 GiB in use", reserved > 1.9)


@question(
    "copies to the host: memory of the GPU's NUMA node, and of others",
    "the GPU's is the fastest, within 5 %",
)
def _numa() -> Answer:
    home, allowed = numa.node_of(pci_address(torch.cuda.current_device())), os.sched_getaffinity(0)
    nodes = {node: cpus & allowed for node, cpus in numa.nodes().items() if cpus & allowed}
    on_gpu, kept, speeds = torch.empty(_GIB, dtype=torch.uint8, device="cuda"), [], {}
    try:
        for node, cpus in nodes.items():
            os.sched_setaffinity(0, cpus)  # of this thread, which pins
            kept.append(torch.empty_like(on_gpu, device="cpu", pin_memory=True))
            copy = partial(kept[-1].copy_, on_gpu, non_blocking=True)
            speeds[node] = _GIB / min(seconds_of(copy, "cuda") for _ in range(3)) / 1e9
    finally:
        os.sched_setaffinity(0, allowed)
    told = ", ".join(f"node {node} {speed:.1f} GB/s" for node, speed in speeds.items())
    is_home = home in speeds and speeds[home] > 0.95 * max(speeds.values())
    return Answer(f"{told}; the GPU is on node {home}", is_home or len(numa.nodes()) < 2)


class _Recomputing(torch.nn.Module):
    """A layer whose norm and activation Megatron empties in forward and computes again."""

    def __init__(self, norm: torch.nn.Module, width: int) -> None:
        super().__init__()
        self.norm, self.wide = norm, torch.nn.Linear(width, 4 * width)
        self.narrow = torch.nn.Linear(4 * width, width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel import CheckpointWithoutOutput

        norm, activation = (CheckpointWithoutOutput(fp8=None) for _ in range(2))
        wide = self.wide(norm.checkpoint(self.norm, hidden_states))
        norm.discard_output_and_register_recompute(wide)
        out = self.narrow(activation.checkpoint(torch.nn.functional.gelu, wide))
        activation.discard_output_and_register_recompute(out)
        return hidden_states + out


@question(
    "gradients with offload, layernorm and moe_act being recomputed",
    "those without offload",
)
def _offload_beside_recomputation() -> Answer:
    """By Megatron's own recomputation, with TransformerEngine's norm where it is installed."""
    from megatron_hdp.megatron.execution.model_pass import emptied_kept

    try:
        from transformer_engine.pytorch import RMSNorm
    except ImportError:
        from torch.nn import RMSNorm
    device, width, tokens = torch.device("cuda"), 1024, 8192
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(_Recomputing(RMSNorm(width), width) for _ in range(6))
    layers.to(device, torch.bfloat16)
    offload = ActivationOffload(layers, device, layers.parameters)
    given, gradients = torch.randn(tokens, width, device=device, dtype=torch.bfloat16), []
    for ratio in (0.0, 0.5, 1.0):
        layers.zero_grad()
        hidden = given.clone().requires_grad_()
        with offload.micro_batch(ratio, tokens) as stash, emptied_kept(stash):
            for layer in layers:
                hidden = layer(hidden)
        hidden.float().square().mean().backward()
        gradients.append([one.grad.float() for one in layers.parameters()])
    errors = [
        max(float((a - b).norm() / b.norm()) for a, b in zip(one, gradients[0], strict=True))
        for one in gradients[1:]
    ]
    told = f"errors {errors[0]:.1e} and {errors[1]:.1e}; {offload.offloaded_bytes / 1e6:.0f} MB"
    return Answer(told, max(errors) < 1e-3 and offload.offloaded_bytes > 0)


def _while_the_queue_is_full(launch: Callable[[], object], measure: Callable[[], float]) -> float:
    """What is measured, at most, while another thread stands in a launch behind a long kernel."""
    torch.cuda.synchronize()
    torch.cuda._sleep(_SLEEP_CYCLES)
    begun = time.monotonic()

    def fill() -> None:
        for _ in range(20_000):
            launch()

    filling = threading.Thread(target=fill)
    filling.start()
    most = 0.0
    while time.monotonic() - begun < 1.0:
        most = max(most, measure())
    filling.join()
    torch.cuda.synchronize()
    return most


def _tick_ms(ask: Callable[[], object] = lambda: None) -> float:
    begun = time.monotonic()
    ask()
    time.sleep(0.001)
    return (time.monotonic() - begun) * 1e3


@question("asking an event while the queue of launches is full", "does not wait: below 10 ms")
def _query() -> Answer:
    x, event = torch.zeros(1, device="cuda"), torch.cuda.Event()
    query = DriverQuery(ctypes.CDLL("libcuda.so.1"))
    event.record()
    torch.cuda.synchronize()
    if not query(event):
        return Answer("the driver says that a passed event is not passed", False)
    driver_ms, torch_ms = (
        _while_the_queue_is_full(lambda: x.add_(1), lambda ask=ask: _tick_ms(ask) - 1)
        for ask in (lambda: query(event), event.query)
    )
    found = f"driver {driver_ms:.2f} ms at most, PyTorch's query {torch_ms:.2f} ms"
    return Answer(found, driver_ms < 10)


@question("do other threads run while a launch or record waits", "yes, both")
def _lock() -> Answer:
    x = torch.zeros(1, device="cuda")
    launching_ms = _while_the_queue_is_full(lambda: x.add_(1), _tick_ms)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(64)]
    number = iter(range(10**9))
    record = lambda: events[next(number) % 64].record()  # noqa: E731
    recording_ms = _while_the_queue_is_full(record, _tick_ms)
    found = f"longest pause {launching_ms:.0f} ms in launches, {recording_ms:.0f} ms in records"
    return Answer(found, launching_ms < 100 and recording_ms < 100)


@question("a wait that the device can be found in costs the host", "less than 30 us")
def _cost() -> Answer:
    timeline, number = Timeline(clock_of(torch.device("cuda"))), 300
    for _ in range(2):  # the second time with events that exist
        timeline.reset()
        begun = time.perf_counter()
        for _ in range(number):
            with timeline.marked(RING_WAIT):
                pass
        cost_us = (time.perf_counter() - begun) / number * 1e6
        reached = timeline.reached()
    assert reached is not None
    return Answer(f"{cost_us:.1f} us", cost_us < 30)
