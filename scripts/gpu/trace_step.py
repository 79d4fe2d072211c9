"""Records one step of a few 7B-shaped layers with a ring and offload, and draws its four lanes.

``python scripts/gpu/trace_step.py PICTURE.png`` runs two ranks on the one GPU, which NCCL takes for
two machines, so that there is a ring; where it refuses, one rank, and the ring's lane stays empty.
``--trace FILE`` draws a trace that torch.profiler has exported before.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import four_lanes
from several_ranks import one_gpu_environment

RANKS = 2
LIMIT_S = {"cuda": 75, "cpu": 120}


def record(trace: Path, device: str, small: bool, num_ranks: int) -> str | None:
    """Run the step on so many ranks, of which the first writes `trace`; what went wrong, or None.

    Args:
        trace: the file.
        device: "cuda" or "cpu".
        small: sizes for a CPU.
        num_ranks: all of them on the first GPU.
    """
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    options = ["--trace", trace, "--device", device, *(["--small"] if small else [])]
    started = []
    for rank in range(num_ranks):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        }
        if num_ranks > 1:
            environment |= one_gpu_environment(rank)
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable, __file__, "unused", "--record", *options]
        log = trace.with_name(f"log-{rank}").open("wb")
        started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    end = time.monotonic() + LIMIT_S[device]
    try:  # the others may wait for one that has failed
        while None in (codes := [one.poll() for one in started]) and not any(codes):
            if time.monotonic() > end:
                break
            time.sleep(0.1)
    finally:
        for process in started:
            process.kill()
            process.wait()
    late = next((rank for rank, code in enumerate(codes) if code is None), None)
    failed = next((rank for rank, code in enumerate(codes) if code), late)
    if failed is None:
        return None
    lines = trace.with_name(f"log-{failed}").read_text(errors="replace").splitlines()
    what = f"was not ready after {LIMIT_S[device]} s" if codes[failed] is None else "failed"
    return f"rank {failed} of {num_ranks} {what}: {lines[-1] if lines else codes[failed]}"


def record_rank(trace: Path, small: bool) -> None:
    """What one rank does: two steps to warm up, a third one under the profiler."""
    import torch
    from bench_offload import arguments_of, executor_of, sizes_of
    from torch.profiler import ProfilerActivity, profile

    from megatron_hdp.data.steps import RankMicroBatch, padding_micro_batch
    from megatron_hdp.megatron import parallel

    num_layers, tokens = (3, 256) if small else (6, 8192)
    sizes = replace(sizes_of(small), tokens=(tokens,))
    arguments = arguments_of(sizes, num_layers)
    parallel.join_job(arguments)
    parallel.initialise(arguments)
    executor = executor_of(sizes, num_layers)
    ring = tuple(range(executor.place.num_hdp_ranks))

    def micro_batch(of_ring: bool, ratio: float) -> RankMicroBatch:
        alone = padding_micro_batch(executor.place.hdp_rank, tokens)
        alone.loss_mask[:] = True
        one = replace(alone, offload_ratio=ratio)
        if of_ring and len(ring) > 1:
            return replace(one, ring=ring, ring_slices=(tokens,), local_lengths=())
        return one

    def step() -> None:
        executor.chunks[0].zero_grad_buffer()
        batches = [micro_batch(True, 0.5), micro_batch(False, 0.0), micro_batch(True, 1.0)]
        executor.run(batches, 3 * tokens * len(ring))

    for _ in range(2):
        step()
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as recorded:
        step()
    if parallel.is_first_rank():
        recorded.export_chrome_trace(str(trace))
    parallel.finish()
    parallel.leave_job()


def main() -> int:
    """Record and draw; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--trace", type=Path, help="draw this one")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU: shows that it runs")
    parser.add_argument("--record", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        record_rank(options.trace, options.small)
        return 0
    title = ""
    with tempfile.TemporaryDirectory(prefix="trace-step-") as folder:
        trace = options.trace
        if trace is None:
            trace = Path(folder) / "trace.json"
            where = "one GPU" if options.device == "cuda" else "a CPU"
            title = f"one step of {RANKS} ranks on {where}, the first one's"
            trouble = record(trace, options.device, options.small, RANKS)
            if trouble is not None and options.device == "cuda":
                print(f"the ring's lane stays empty: {trouble}")
                title = "one step of one rank, no ring"
                trouble = record(trace, options.device, options.small, 1)
            if trouble is not None:
                print(trouble)
                return 1
        step = four_lanes.read(trace)
        four_lanes.draw(step, options.picture, title or trace.name)
    print(four_lanes.figures(step))
    return 0


if __name__ == "__main__":
    sys.exit(main())
