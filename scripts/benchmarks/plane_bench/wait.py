"""Training while preprocessing takes most of a step's time: step times, and what ranks wait."""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from plane_bench.common import MAX_LENGTH, environment, heading, hook, table, write_sources
from plane_bench.hooks import BURNS, TOKEN_US

_SHARE = 0.8
_SLOWER, _WAITING = 0.03, 0.01
_BYTES = 256  # the vocabulary that training assumes where no tokenizer is named
_SKIPPED = 2  # steps at the start, which wait for the plane
_TRAIN = Path(__file__).parent / "train.py"


@dataclass
class _Variant:
    """One way to load, and what its runs gave."""

    name: str
    backend: str
    takes_time: bool = True
    burns: bool = False
    steps_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `run` heeds."""
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12, help="of a run, two of them to warm up")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way, in turn")
    parser.add_argument("--sources", type=int, default=4)
    parser.add_argument("--documents", type=int, default=2000, help="of each source")
    parser.add_argument("--sequences", type=int, default=100, help="a step")
    parser.add_argument("--hidden-size", type=int, default=128)


def run(options: argparse.Namespace) -> int:
    """Measure; print a table; return 1 if a loss differs between two ways."""
    print(heading())
    variants = [
        _Variant("in the ranks, no preprocessing", "local", takes_time=False),
        _Variant("data plane, no preprocessing", "ray", takes_time=False),
        _Variant("data plane, sleeping", "ray"),
        _Variant("in the ranks, sleeping", "local"),
        _Variant("data plane, burning CPU", "ray", burns=True),
        _Variant("in the ranks, burning CPU", "local", burns=True),
    ]
    plain = variants[0]
    losses: list[list[float]] = []
    with tempfile.TemporaryDirectory() as own:
        path = write_sources(Path(own), options.sources, options.documents, _BYTES)
        token_us = 0.0
        for number in range(options.rounds):
            for one in variants:
                records = _train(one, path, Path(own) / "metrics.jsonl", token_us, options)
                kept = records[_SKIPPED:]
                one.steps_s += [record["seconds"] for record in kept]
                one.waits_s += [record["data_wait_ms"] / 1e3 for record in kept]
                losses.append([record["loss"] for record in records])
                print(f"{one.name}: {statistics.median(one.steps_s):.2f} s", file=sys.stderr)
                if one is plain and not number:
                    tokens = statistics.median(record["tokens"] for record in kept)
                    step_s = statistics.median(one.steps_s)
                    token_us = 1e6 * _SHARE * step_s * options.ranks / tokens
    print(
        f"{options.ranks} ranks; preprocessing takes {_SHARE:.0%} of a step's time for each rank: "
        f"{token_us:.0f} us a token, {_SHARE * options.ranks:.1f} s for a second of training"
    )
    base_s = statistics.median(plain.steps_s)
    cpu_s = statistics.median(plain.cpu_s)
    rows = [_row(one, base_s, cpu_s, options) for one in variants]
    header = ["way", "step, median", "of the first", "goal", "bound of the CPUs"]
    header += ["wait p50", "wait p99", "of a step", "goal", "CPU s of a run"]
    print(table(header, rows))
    same = all(one == losses[0] for one in losses)
    print("losses of all runs:", "same" if same else "DIFFERENT")
    return 0 if same else 1


def _row(one: _Variant, base_s: float, base_cpu_s: float, options: Any) -> list[str]:
    step_s = statistics.median(one.steps_s)
    p50, p99 = np.percentile(one.waits_s, [50, 99])
    cpus = len(os.sched_getaffinity(0))
    burnt_s = _SHARE * base_s * options.ranks * one.burns
    bound = max(1.0, (min(options.ranks, cpus) * base_s + burnt_s) / (cpus * base_s))
    return [
        one.name,
        f"{step_s:.2f} s",
        f"{step_s / base_s:.3f}",
        f"<= {1 + _SLOWER}" if one.takes_time else "-",
        f"{bound:.2f}",
        f"{1e3 * p50:.1f} ms",
        f"{1e3 * p99:.1f} ms",
        f"{p99 / step_s:.2%}",
        f"<= {_WAITING:.0%}",
        f"{statistics.median(one.cpu_s):.0f}",
    ]


def _train(
    variant: _Variant, path: Path, metrics: Path, token_us: float, options: Any
) -> list[dict[str, Any]]:
    """One run: its records of steps."""
    words = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks)),
        *("--master-port", "0", "--standalone", str(_TRAIN), "--hybrid-data-parallel"),
        *("--num-layers", "2", "--hidden-size", str(options.hidden_size)),
        *("--num-attention-heads", "4", "--seq-length", str(MAX_LENGTH), "--lr", "1e-3"),
        *("--attention-dropout", "0", "--hidden-dropout", "0"),
        *("--train-iters", str(options.steps), "--global-batch-size", str(options.sequences)),
        *("--hdp-data", str(path), "--data-cache-path", str(path.parent / "caches")),
        *("--hdp-tokens-per-rank", str(MAX_LENGTH), "--metrics-path", str(metrics)),
        *("--hdp-loaders", variant.backend),
    ]
    metrics.unlink(missing_ok=True)
    taken_us = token_us if variant.takes_time else 0.0
    variables = {TOKEN_US: str(taken_us), BURNS: str(int(variant.burns))}
    before = _cpu_of_children()
    with environment(**hook("take_time"), **variables):
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"a run ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    variant.cpu_s.append(_cpu_of_children() - before)
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
