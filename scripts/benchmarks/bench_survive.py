"""What ``--hdp-survive`` costs a step that loses nobody: by thread, and in turns without copies.

A job of `megatron-hdp launch` trains a small model with a distributed optimizer. Each rank reads
the kernel's clock of each of its threads between steps: so what sends and keeps copies, what
listens to the agent, and what the training thread does for both is known by itself, however busy
the machine is. Every other block of steps makes no copies, which shows what they cost beyond their
own time. Run: ``python scripts/benchmarks/bench_survive.py``; gloo ranks on CPUs.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from bench_lost_rank import corpus

_FLAGS = ("--hybrid-data-parallel", "--hdp-survive", "--use-distributed-optimizer")
_PARTS = {"copies-send": "sends copies", "copies-serve": "keeps copies", "epochs": "listens"}
_MAIN, _OTHER = "training thread", "other"
_DRAWS = 2000


def _task_ns(process: int | str, task: int | str) -> int:
    """CPU time of a thread."""
    return int(Path(f"/proc/{process}/task/{task}/schedstat").read_text().split()[0])


def _process_ns(process: int) -> int:
    total = 0
    for task in os.listdir(f"/proc/{process}/task"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            total += _task_ns(process, task)
    return total


class Meter:
    """In a rank: what its threads take between the beginnings of steps.

    Args:
        path: of the file for the rank's figures, a line a step.
        block: steps with copies, and then as many without.
    """

    def __init__(self, path: Path, block: int) -> None:
        self._file = path.open("w")
        self._block = block
        self._step = 0
        self._main_ns = self._main_wait_s = 0.0
        self._before: dict[str, float] = {}

    def install(self) -> None:
        """Looks on from now on."""
        from megatron_hdp.megatron.world import Recovery
        from megatron_hdp.megatron.world.surviving_shards import SurvivingShards
        from megatron_hdp.runtime.epochs import Membership

        for owner, name in (
            (SurvivingShards, "begin"),
            (SurvivingShards, "before_change"),
            (SurvivingShards, "take"),
            (Recovery, "keep"),
            (Recovery, "name_slow"),
            (Membership, "require_ongoing"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name), name))
        begin = SurvivingShards.begin

        @functools.wraps(begin)
        def begun(shards: Any, agreed: int) -> None:
            self._note()  # before it is timed
            begin(shards, agreed)

        SurvivingShards.begin = begun  # type: ignore[method-assign]

    @property
    def _copies(self) -> bool:
        return self._step // self._block % 2 == 0

    def _timed(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            if name == "take" and not self._copies:
                return None
            cpu, wall = time.thread_time_ns(), time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._main_ns += time.thread_time_ns() - cpu
                self._main_wait_s += time.perf_counter() - wall

        return called

    def _note(self) -> None:
        now = {"wall": time.perf_counter(), "cpu": time.process_time(), _MAIN: self._main_ns / 1e9}
        now |= {"waits": self._main_wait_s, "agent": _process_ns(os.getppid()) / 1e9}
        by_name: dict[str, float] = defaultdict(float)
        for thread in threading.enumerate():
            with suppress(FileNotFoundError, ProcessLookupError):
                by_name[thread.name] += _task_ns("self", thread.native_id or 0) / 1e9
        now |= {part: by_name[name] for name, part in _PARTS.items()}
        if self._before:
            line = {name: now[name] - self._before.get(name, 0.0) for name in now}
            is_first = self._step % self._block == 0  # nothing was sent in it yet
            line |= {"step": self._step, "copies": self._copies, "counts": not is_first}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            self._step += 1
        self._before = now


def train(path: str, block: int, flags: list[str]) -> None:
    """Body of a rank."""
    from megatron_hdp import pretrain_gpt

    Meter(Path(path) / f"rank-{os.environ['RANK']}", block).install()
    sys.argv[1:] = flags
    pretrain_gpt.run()


def interval(draw: Callable[[np.random.Generator], float]) -> str:
    """The middle 95 % of what resampled figures would be."""
    rng = np.random.default_rng(0)
    low, high = np.quantile([draw(rng) for _ in range(_DRAWS)], [0.025, 0.975])
    return f"{low:+.2%} to {high:+.2%}"


def show(ranks: list[list[dict[str, Any]]]) -> None:
    """Prints what the ranks have noted, without the first blocks."""
    steps = min(map(len, ranks))
    table = {
        name: np.array([[one[step][name] for step in range(steps)] for one in ranks])
        for name in ranks[0][0]
    }
    counts, copies = table["counts"][0], table["copies"][0]
    warm = np.arange(steps) >= np.flatnonzero(~copies)[0]
    on, off = (np.flatnonzero(counts & warm & (copies == kind)) for kind in (True, False))
    cpu = table["cpu"]
    print(f"{len(ranks)} ranks, {len(on)} steps with copies and {len(off)} without, of them")
    print(f"a step by the clock {np.median(table['wall'][0, on]):.3f} s, CPU of a rank", end=" ")
    print(f"{cpu[:, on].mean():.3f} s")
    parts = [*_PARTS.values(), _MAIN]
    for part in parts:
        share = table[part][:, on].sum(1) / cpu[:, on].sum(1)
        ms = 1e3 * table[part][:, on].mean(1)
        print(f"{part:<16} {ms.max():.3f} ms of the rank that it takes most, {share.max():.2%}")
    own = sum(table[part] for part in parts)

    def share_of(chosen: np.ndarray) -> float:
        return float((own[:, chosen].sum(1) / cpu[:, chosen].sum(1)).max())

    within = interval(lambda rng: share_of(rng.choice(on, len(on))))
    print(f"all of it        {share_of(on):.2%} of a rank's CPU time, {within}")
    agent = table["agent"][0, on].sum() / cpu[:, on].sum()
    print(f"the agent        {agent:.2%} of all ranks' CPU time")
    waits = 1e3 * np.median(table["waits"][:, on].max(0))
    print(f"waits            {waits:.3f} ms of a step, in calls for all of it, median")
    busiest = cpu.max(0)
    for name, figures in (("CPU of the busiest", busiest), ("clock", table["wall"].max(0))):

        def more(first: np.ndarray, other: np.ndarray, figures: np.ndarray = figures) -> float:
            return float(np.median(figures[first]) / np.median(figures[other]) - 1)

        within = interval(lambda rng: more(rng.choice(on, len(on)), rng.choice(off, len(off))))
        print(f"in turns         {name}: {more(on, off):+.2%} with copies, {within}")


def main() -> None:
    """Starts a job, and shows its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=20, help="half of them with copies")
    parser.add_argument("--block", type=int, default=6, help="steps of one")
    parser.add_argument("--tokens", type=int, default=16384, help="of a step")
    parser.add_argument("--hidden-size", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        flags = [*_FLAGS, "--config", "configs/tiny-cpu.yaml", "--seq-length", "2048"]
        flags += ["--hidden-size", str(options.hidden_size), "--data-path", corpus(Path(name))]
        flags += ["--hdp-global-batch-tokens", str(options.tokens)]
        flags += ["--hdp-tokens-per-rank", str(max(1024, options.tokens // options.ranks // 2))]
        flags += ["--train-iters", str(options.blocks * options.block + 2), "--log-interval", "50"]
        agent = [sys.executable, "-m", "megatron_hdp.cli.main", "launch", "--nproc-per-node"]
        body = [str(options.ranks), __file__, "--rank", name]
        command = [*agent, *body, str(options.block), *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        show(
            [
                [json.loads(line) for line in path.read_text().splitlines()]
                for path in sorted(Path(name).glob("rank-*"))
            ]
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        train(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    else:
        main()
