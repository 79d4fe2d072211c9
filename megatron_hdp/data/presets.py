"""Sequence lengths like those of the paper's two datasets, drawn at random."""

import numpy as np

from megatron_hdp.arrays import Int64Array

PRESETS: dict[str, tuple[float, ...]] = {
    "github": (34.0, 10.7, 10.4, 10.2, 9.5, 9.0, 6.4, 4.5, 2.9, 1.5, 0.9),
    "byted": (14.2, 11.1, 7.6, 7.6, 7.6, 7.6, 7.3, 7.6, 7.6, 9.7, 12.1),
}
"""Percent of the tokens in each bin: below 4K, [4K, 8K), [8K, 16K) ... [1M, 2M), exactly 2M.

Source: ByteScale section 3.1; the shares below 128K are read from its pie charts.
"""

LONGEST = 2 * 1024 * 1024
"""Tokens of the longest sequence of a preset."""

_MOST_SEQUENCES = 2**27  # of a draw: a gigabyte
_SHORTEST = 128  # with it, 80 % of byted's sequences are below 4K, as in the paper


def preset_lengths(name: str, *, num_tokens: int, max_length: int, seed: int = 0) -> Int64Array:
    """Draws sequences until they have ``num_tokens`` tokens; the last one is cut to fit.

    Lengths are log-uniform within a bin and cut to ``max_length``.

    Raises:
        ValueError: an unknown preset, or a number below 1.
    """
    if name not in PRESETS:
        raise ValueError(f"preset is {name!r}; expected one of {', '.join(PRESETS)}")
    for what, value in (("num_tokens", num_tokens), ("max_length", max_length)):
        if value < 1:
            raise ValueError(f"{what} is {value}; expected at least 1")
    edges = np.array([_SHORTEST, *(4096 * 2**k for k in range(9)), LONGEST], dtype=np.float64)
    low, high = edges, np.append(edges[1:], LONGEST)
    ratio = np.maximum(high / low, 1 + 1e-12)
    mean = np.where(high > low, (high - low) / np.log(ratio), low)
    counts = np.array(PRESETS[name]) / mean[: len(PRESETS[name])]
    expected = num_tokens * counts.sum() / 100
    if expected > _MOST_SEQUENCES:
        raise ValueError(
            f"num_tokens is {num_tokens:,}, about {expected:,.0f} sequences; expected at most "
            f"{_MOST_SEQUENCES:,}"
        )
    generator = np.random.default_rng(seed)
    drawn = np.zeros(0, dtype=np.int64)
    while drawn.sum() < num_tokens:
        size = 1024 + int(1.1 * num_tokens * counts.sum() / 100)
        bins = generator.choice(len(counts), size=size, p=counts / counts.sum())
        lengths = low[bins] * ratio[bins] ** generator.random(size)
        drawn = np.concatenate([drawn, np.minimum(lengths.astype(np.int64), max_length)])
    ends = np.cumsum(drawn)
    last = int(np.searchsorted(ends, num_tokens))
    result = drawn[: last + 1].copy()
    result[-1] -= ends[last] - num_tokens
    return result
