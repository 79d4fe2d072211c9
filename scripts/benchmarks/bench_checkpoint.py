"""What checksums cost a save and a load of a checkpoint, measured side by side.

``torchrun --nproc-per-node 2 scripts/benchmarks/bench_checkpoint.py`` saves and loads a model in
turns, with and without checksums, and prints medians. Files are in the page cache when they are
summed and loaded, so nothing of the cost hides behind slow storage.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megatron_hdp.data import TokenWriter
from megatron_hdp.data.mixture import Position
from megatron_hdp.megatron import known_warnings, parallel
from megatron_hdp.megatron.checkpoint.checkpoints import Checkpoints
from megatron_hdp.megatron.checkpoint.checksums import FileSum
from megatron_hdp.megatron.checkpoint.state import Progress, TrainingState
from megatron_hdp.megatron.options import TrainingArguments, parse_arguments
from megatron_hdp.runtime.timeline import Timeline
from megatron_hdp.training.job import Job, build_job


def main() -> None:
    """Measures and prints one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="of the model (default: 4)")
    parser.add_argument("--hidden-size", type=int, default=1024, help="of it (default: 1024)")
    parser.add_argument("--rounds", type=int, default=5, help="of measuring (default: 5)")
    parser.add_argument("--folder", type=Path, help="where to save (default: a temporary one)")
    options = parser.parse_args()
    known_warnings.leave_out()
    with tempfile.TemporaryDirectory(dir=options.folder) as own:
        arguments = _arguments(Path(own), options)
        parallel.join_job(arguments)
        folder = _of_first_rank(Path(own))
        parallel.initialise(arguments)
        parallel.set_seeds(arguments.seed)
        job = build_job(arguments, Timeline())
        _one_step(job)
        _measure(job, folder, options.rounds)
        job.close()
        dist.barrier()
    parallel.finish()
    parallel.leave_job()


def _arguments(folder: Path, options: argparse.Namespace) -> TrainingArguments:
    with TokenWriter(str(folder / "corpus"), 257) as writer:
        for _ in range(8):
            writer.add(np.arange(32))
    return parse_arguments(
        f"--hybrid-data-parallel --hdp-tokens-per-rank 64 --seq-length 32 --global-batch-size 4 "
        f"--attention-dropout 0 --hidden-dropout 0 --num-layers {options.layers} --train-iters 1 "
        f"--hidden-size {options.hidden_size} --num-attention-heads 8 --lr 1e-3 --split 1,0,0 "
        f"--use-distributed-optimizer --data-path {folder / 'corpus'}".split()
    )


def _of_first_rank(folder: Path) -> Path:
    shared = [folder]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _one_step(job: Job) -> None:
    """After it the optimizer has its state."""
    for chunk in job.chunks:
        chunk.zero_grad_buffer()
    job.optimizer.zero_grad()
    job.training.run(Position())
    job.optimizer.step()
    job.scheduler.step(increment=1)


def _measure(job: Job, folder: Path, rounds: int) -> None:
    seconds: dict[str, list[float]] = defaultdict(list)
    num_bytes, largest = 0, Path()
    for number in range(rounds):
        for with_sums in (False, True) if number % 2 else (True, False):
            place = folder / f"{number}-{with_sums}"
            arguments = replace(job.arguments, save=place, checkpoint_checksums=with_sums)
            saving = _checkpoints(job, arguments)
            saving.load()  # takes the folder
            how = "with checksums" if with_sums else "without"
            seconds[f"save, {how}"].append(_time(lambda it=saving: it.save(Progress(1))))  # type: ignore[misc]
            saving.finish()
            saving.close()
            loading = _checkpoints(job, replace(arguments, save=None, load=place))
            seconds[f"load, {how}"].append(_time(loading.load))
            files = sorted(place.glob("*/*"), key=lambda path: path.stat().st_size)
            num_bytes, largest = sum(path.stat().st_size for path in files), files[-1]
            if with_sums:
                speed = largest.stat().st_size / _time(lambda path=largest: FileSum.of_file(path))  # type: ignore[misc]
                seconds["GB/s"].append(speed / 1e9)
            dist.barrier()
            if parallel.is_first_rank():
                shutil.rmtree(place)
    parallel.say(f"{num_bytes / 1e9:.2f} GB, {dist.get_world_size()} ranks, {rounds} rounds")
    rate = statistics.median(seconds["GB/s"]) * 1e9
    alone = num_bytes / dist.get_world_size() / rate
    for what in ("save", "load"):
        plain, summed = (seconds[f"{what}, {how}"] for how in ("without", "with checksums"))
        share = statistics.median(one / two for one, two in zip(summed, plain, strict=True)) - 1
        parallel.say(
            f"{what}: {statistics.median(plain):.3f} s without, {statistics.median(summed):.3f} s "
            f"with checksums, {share:+.1%} (median of rounds); summing alone is "
            f"{alone / statistics.median(plain):.1%}"
        )
    parallel.say(f"summing a file: {rate / 1e9:.1f} GB/s a rank, {alone:.3f} s for its share")


def _checkpoints(job: Job, arguments: TrainingArguments) -> Checkpoints:
    state = TrainingState(arguments, job.training.order, job.chunks, job.optimizer, job.scheduler)
    return Checkpoints(arguments, state, lambda line: None)


def _time(action: Callable[[], object]) -> float:
    """Seconds until all ranks have done it."""
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
