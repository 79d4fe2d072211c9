"""What drawing a step's sequences costs, beside numpy's permutation of the whole epoch.

``python scripts/bench_data.py`` draws steps of epochs of growing length, every time another epoch,
and prints medians and private memory (USS) that the order added; then a whole step of
`StepSampler`, lengths gathered, at one length. What keeps a table of the epoch is measured up to
``--table-up-to`` rows, once: numpy's permutation, and version 1 of the order.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil

from megatron_hdp.data import StepSampler
from megatron_hdp.data.shuffles import Feistel, SortedDraws

_MB = 1e6


def main() -> None:
    """Measures and prints two tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[1_000_000, 50_000_000, 200_000_000, 1_000_000_000],
        help="of an epoch (default: 1M 50M 200M 1G)",
    )
    parser.add_argument("--draws", type=int, default=60_000, help="of a step (default: 60,000)")
    parser.add_argument("--rounds", type=int, default=51, help="of measuring (default: 51)")
    parser.add_argument(
        "--table-up-to", type=int, default=50_000_000, help="rows (default: 50M; 16 bytes each)"
    )
    parser.add_argument(
        "--step-rows", type=int, default=50_000_000, help="of a whole step (default: 50M)"
    )
    options = parser.parse_args()
    print(f"{options.draws:,} draws, median of {options.rounds} epochs (private MB added)")
    print(f"{'rows':>15} {'version 2':>20} {'numpy, once':>20} {'version 1, once':>20}")
    for num_rows in options.rows:
        count = min(options.draws, num_rows)
        cells = [_draws(num_rows, count, options.rounds)]
        if num_rows <= options.table_up_to:
            cells += [_once(_numpys, num_rows), _once(_first_version, num_rows)]
        print(f"{num_rows:15,} " + " ".join(f"{cell:>20}" for cell in cells), flush=True)
    print(_whole_steps(options.step_rows, options.draws, options.rounds))


def _draws(num_rows: int, count: int, rounds: int) -> str:
    before, order = _private(), Feistel(num_rows, seed=1)
    first = (num_rows - count) // 2
    ms = [1e3 * _timed(lambda epoch=i: order.rows(epoch, first, count))[0] for i in range(rounds)]
    return f"{statistics.median(ms):.2f} ms ({(_private() - before) / _MB:.1f})"


def _numpys(num_rows: int) -> Any:
    return np.random.default_rng(1).permutation(num_rows)


def _first_version(num_rows: int) -> Any:
    order = SortedDraws(num_rows, seed=1)
    order.rows(0, 0, 1)
    return order


def _once(make: Callable[[int], Any], num_rows: int) -> str:
    before = _private()
    seconds, kept = _timed(lambda: make(num_rows))
    added = _private() - before
    del kept
    return f"{seconds * 1e3:,.0f} ms ({added / _MB:,.0f})"


def _whole_steps(num_rows: int, count: int, rounds: int) -> str:
    lengths = np.random.default_rng(1).integers(1, 8192, num_rows)
    sampler = StepSampler(lengths, seed=1, global_batch_size=count)
    by_tokens = StepSampler(lengths, seed=1, global_batch_tokens=count * int(lengths.mean()))
    cells = []
    for name, one in (("sequences", sampler), ("tokens", by_tokens)):
        starts = [i * num_rows // rounds for i in range(rounds)]
        ms = [1e3 * _timed(lambda at=at, it=one: it.step(at))[0] for at in starts]
        cells.append(f"{statistics.median(ms):.1f} ms by {name}")
    return f"a step of about {count:,} sequences of {num_rows:,}: {', '.join(cells)}"


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


def _private() -> int:
    return int(psutil.Process().memory_full_info().uss)


if __name__ == "__main__":
    main()
