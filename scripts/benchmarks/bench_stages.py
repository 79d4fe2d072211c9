"""A long sequence among short ones on pipeline stages: whole and in parts, side by side.

One HDP rank of several stages (gloo, a process a stage, a thread each) runs the same batch by two
plans in turn: every micro-batch whole, and in parts as the planner has them. A stage that waits
leaves its core to others, so beside the time of a step stand the CPU time of all stages, and how
much of the stages' time is none. Where cores are fewer than stages no step takes less than that CPU
time over the cores. Run: ``python scripts/benchmarks/bench_stages.py``.
"""

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parents[2]))

VOCABULARY = 256
FLAGS = ("--config", "configs/tiny-cpu.yaml")
WAYS = ("whole", "parts")


def flags_of(settings: argparse.Namespace) -> list[str]:
    """Of the session: a stage a process, room for the long sequence on the one HDP rank."""
    sizes = {
        "pipeline-model-parallel-size": settings.stages,
        "num-layers": settings.layers,
        "hidden-size": settings.hidden,
        "num-attention-heads": max(1, settings.hidden // 64),
        "seq-length": settings.long,
        "hdp-tokens-per-rank": settings.long,
        "hdp-sequence-parts": settings.parts,
    }
    return [*FLAGS, *(word for name, size in sizes.items() for word in (f"--{name}", str(size)))]


def plans_of(session: Any, batch: list[Any], settings: argparse.Namespace) -> dict[str, Any]:
    """By way: the session's plan, and the same whose micro-batches are whole."""
    parts = session.plan(batch)
    return {"whole": replace(parts, num_parts=None, linear_tokens=0.0), "parts": parts}


def measure(rank: int, settings: argparse.Namespace, folder: str) -> None:
    """Body of a stage; the first prints."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(settings.stages), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(settings.port)}
    torch.set_num_threads(1)
    from megatron_hdp.session import HdpSession

    session = HdpSession.from_flags(flags_of(settings), vocab_size=VOCABULARY)
    lengths = [settings.long, *[settings.short] * settings.shorts]
    rows = []
    for step in range(settings.steps + 1):  # the first is not counted
        data, row = np.random.default_rng(step), {}
        batch = [data.integers(0, VOCABULARY, length) for length in lengths]
        plans = plans_of(session, batch, settings)
        for way in WAYS[:: 1 if step % 2 else -1]:  # they take turns
            dist.barrier()
            begin, cpu = perf_counter(), process_time()
            report = session.step(batch, plan=plans[way])
            busy = torch.tensor(process_time() - cpu, dtype=torch.float64)
            dist.barrier()
            taken_s = perf_counter() - begin
            dist.all_reduce(busy)
            row[way] = {"s": taken_s, "cpu": float(busy), "loss": float(report.loss)}
        rows.append(row)
    if rank == 0:
        told(rows[1:], settings)
    session.close()


def told(rows: list[dict[str, dict[str, float]]], settings: argparse.Namespace) -> None:
    """Prints a row for each way, and how far losses are apart."""
    cores = len(os.sched_getaffinity(0))
    print(
        f"{settings.stages} stages on {cores} cores, a sequence of {settings.long:,} tokens and "
        f"{settings.shorts} of {settings.short:,}, in up to {settings.parts} parts; medians of "
        f"{len(rows)} steps\n\n"
        "| micro-batches | s a step | CPU s, all stages | stages' time without work |\n"
        "|---|---|---|---|"
    )
    for way in WAYS:
        seconds, cpu = (median(row[way][key] for row in rows) for key in ("s", "cpu"))
        idle = median(1 - row[way]["cpu"] / settings.stages / row[way]["s"] for row in rows)
        print(f"| {way} | {seconds:.2f} | {cpu:.2f} | {idle:.2f} |")
    ratio = median(row["parts"]["s"] / row["whole"]["s"] for row in rows)
    bound = median(
        row["parts"]["cpu"] / min(cores, settings.stages) / row["whole"]["s"] for row in rows
    )
    print(f"parts / whole: {ratio:.2f}; the CPU time of parts on these cores alone: {bound:.2f}")
    apart = max(abs(row["parts"]["loss"] / row["whole"]["loss"] - 1) for row in rows)
    print(f"largest relative difference of the loss: {apart:.1e}")


def main() -> None:
    """Starts the stages."""
    from megatron_hdp.processes.ports import free_port

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag, number, of in (
        ("stages", 4, "pipeline stages"),
        ("steps", 5, "steps that are measured"),
        ("long", 16384, "tokens of the long sequence"),
        ("shorts", 16, "short sequences"),
        ("short", 512, "tokens of each"),
        ("parts", 16, "parts of a micro-batch at most"),
        ("layers", 8, "layers of all stages"),
        ("hidden", 128, "size of a token"),
    ):
        parser.add_argument(f"--{flag}", type=int, default=number, help=f"{of} ({number})")
    settings = parser.parse_args()
    settings.port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (settings, folder), nprocs=settings.stages)


if __name__ == "__main__":
    main()
