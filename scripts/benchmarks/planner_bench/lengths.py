"""Lengths of sequences that are no preset's."""

import sysconfig
from pathlib import Path

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.presets import LONGEST


def tailed_lengths(room: int, seed: int) -> Int64Array:
    """Lengths up to 4 x ``room`` tokens together, four of five short, the others a Pareto tail."""
    rng = np.random.default_rng(seed)
    count = 4 * room // 1000
    tail = 3000 * (1 + rng.pareto(1.3, count))
    short = rng.uniform(300, 2000, count)
    lengths = np.where(rng.random(count) < 0.2, tail, short).clip(max=min(LONGEST, room))
    whole = lengths.astype(np.int64)
    return whole[: int(np.searchsorted(np.cumsum(whole), 4 * room, side="right"))]


def python_lengths(room: int, seed: int) -> Int64Array:
    """Lengths of the standard library's files in a random order, up to 4 x ``room`` tokens."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(folder.rglob("*.py")) if "site-packages" not in path.parts]
    sizes = np.array([size for path in files if (size := path.stat().st_size)], dtype=np.int64)
    lengths = np.random.default_rng(seed).permutation(sizes).clip(max=min(LONGEST, room))
    return lengths[: int(np.searchsorted(np.cumsum(lengths), 4 * room, side="right"))]
