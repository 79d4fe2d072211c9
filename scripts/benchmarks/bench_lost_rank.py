"""Steps under kills: a job whose ranks resume in place, beside one that restarts from checkpoints.

Each job trains the same small model on this machine for as long, from its first step on. Every so
many seconds a rank, drawn by the seed, gets SIGKILL. One that nobody kills says how many steps
there could be; shares are of these. Behind each kill it is measured how long it takes until another
step has ended, behind the last one also after the time: in place the one that ran, again, with its
forward and backward. Restarts are torchrun's, from a checkpoint every few steps.
Run: ``python scripts/benchmarks/bench_lost_rank.py``; gloo ranks on CPUs.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from megatron_hdp.data import TokenWriter

VOCABULARY = 257
LONGEST, DOCUMENTS = 1500, 4000
_TAIL_BYTES = 1 << 16
FLAGS = (
    *("--hybrid-data-parallel", "--config", "configs/tiny-cpu.yaml", "--seq-length", "2048"),
    *("--hdp-tokens-per-rank", "1024", "--hdp-global-batch-tokens", "8192"),
    *("--train-iters", "1000000", "--use-distributed-optimizer", "--log-interval", "100"),
)
_LOOK_S = 0.01
_LATEST_S = 300.0  # until a step has ended behind a kill: a job that takes longer has ended itself


def corpus(folder: Path) -> str:
    """Random documents, many short and some long."""
    data = np.random.default_rng(0)
    prefix = folder / "corpus"
    with TokenWriter(prefix, VOCABULARY) as writer:
        for length in np.minimum(data.lognormal(5.0, 1.2, DOCUMENTS) + 2, LONGEST).astype(int):
            writer.add(data.integers(0, VOCABULARY - 1, length))
    return str(prefix)


def command(kind: str, options: argparse.Namespace, folder: Path, prefix: str) -> list[str]:
    """What starts a job."""
    train = ["-m", "megatron_hdp.pretrain_gpt", *FLAGS, "--data-path", prefix]
    train += ["--metrics-path", str(folder / "metrics.jsonl")]
    number = ["--nproc-per-node", str(options.ranks)]
    if kind == "in place":
        agent = [sys.executable, "-m", "megatron_hdp.cli.main", "launch"]
        return [*agent, *number, *train, "--hdp-survive"]
    saved = str(folder / "saved")
    keep = ["--save", saved, "--load", saved, "--save-interval", str(options.save_interval)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    restarts = ["--max-restarts", "1000", "--monitor-interval", "0.1"]
    return [*torchrun, *restarts, *number, *train, *keep]


def done(folder: Path) -> int:
    """The latest step that the metrics tell of."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().splitlines()
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except ValueError:  # half of a line is written
            continue
    return 0


def ranks_of(job: psutil.Process) -> list[psutil.Process]:
    """The processes that train."""
    found = []
    for one in job.children(recursive=True):
        try:
            if "megatron_hdp.pretrain_gpt" in " ".join(one.cmdline()):
                found.append(one)
        except psutil.Error:
            continue
    return found


def run(
    kind: str, kill_each_s: float | None, options: argparse.Namespace
) -> tuple[int, int, list[float]]:
    """Steps in the time, kills, and seconds from each kill until another step had ended."""
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        argv = command(kind, options, folder, corpus(folder))
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(argv, stdout=log, stderr=log)
        job, kills = psutil.Process(process.pid), 0
        try:
            while not done(folder):
                if process.poll() is not None:
                    raise RuntimeError(f"{kind}: {(folder / 'log').read_text()[-3000:]}")
                time.sleep(_LOOK_S)
            first, began = done(folder), time.monotonic()
            most = in_time = first
            killed_at, waits = None, []
            while True:
                now_s = time.monotonic() - began
                is_over = now_s >= options.seconds
                if is_over and killed_at is None:
                    return in_time - first, kills, waits
                if now_s > options.seconds + _LATEST_S:
                    raise RuntimeError(f"{kind}: no step in {_LATEST_S:.0f} s behind a kill")
                if process.poll() is not None:
                    raise RuntimeError(f"{kind}: {(folder / 'log').read_text()[-3000:]}")
                step = done(folder)
                if killed_at is not None and step > most:
                    waits.append(time.monotonic() - killed_at)
                    killed_at = None
                most = max(most, step)
                if not is_over:
                    in_time = most
                    if kill_each_s is not None and now_s >= (kills + 1) * kill_each_s:
                        victims = sorted(ranks_of(job), key=lambda one: one.pid)
                        if victims:
                            most = max(most, done(folder))
                            killed_at = time.monotonic()
                            draw.choice(victims).kill()
                        kills += 1
                time.sleep(_LOOK_S)
        finally:
            end(process, job)


def end(process: subprocess.Popen[bytes], job: psutil.Process) -> None:
    """Ends a job and whatever it has started."""
    everyone = job.children(recursive=True) if process.poll() is None else []
    process.send_signal(signal.SIGKILL)
    process.wait()
    for one in everyone:
        try:
            one.kill()
        except psutil.Error:
            continue


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kill-each", type=float, nargs="+", default=[60.0, 30.0, 10.0])
    parser.add_argument("--seconds", type=float, default=180.0, help="of each run")
    parser.add_argument("--save-interval", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(
        "| a kill each | kills | steps in place | steps with restarts | seconds until a step has "
        "ended, median (worst): in place | with restarts |\n|---|---|---|---|---|---|"
    )
    whole = {kind: run(kind, None, options)[0] for kind in ("in place", "restarts")}
    print(f"| never | 0 | {whole['in place']} | {whole['restarts']} | | |", flush=True)
    for kill_each_s in options.kill_each:
        cells, times = [], []
        for kind in ("in place", "restarts"):
            steps, kills, waits = run(kind, kill_each_s, options)
            cells.append(f"{steps} ({steps / whole[kind]:.0%})")
            times.append(f"{np.median(waits):.2f} ({max(waits):.2f})" if waits else "never")
        row = " | ".join([f"{kill_each_s:g} s", str(kills), *cells, *times])
        print(f"| {row} |", flush=True)


if __name__ == "__main__":
    main()
