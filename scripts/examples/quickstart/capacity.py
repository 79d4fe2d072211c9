"""The capacity that lets the quickstart run on any number of ranks.

``python scripts/examples/quickstart/capacity.py RANKS CONFIG.yaml`` prints tokens per rank: those
of the configuration, or as many more as the ranks need to hold the longest sequence together.
"""

import sys
from pathlib import Path

import yaml


def tokens_per_rank(ranks: int, context: int, configured: int) -> int:
    """Return the capacity; a sequence over ``ranks`` ranks is cut into twice as many equal chunks.

    Args:
        ranks: of the run.
        context: tokens of the longest sequence.
        configured: capacity that is kept where it suffices.
    """
    chunk = -(-context // (2 * ranks))
    return max(configured, 2 * chunk)


def main(ranks: str, config: str) -> None:
    """Print the capacity."""
    groups = yaml.safe_load(Path(config).read_text())
    context = groups["model"]["seq-length"]
    print(tokens_per_rank(int(ranks), context, groups["batch"]["hdp-tokens-per-rank"]))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: capacity.py RANKS CONFIG.yaml")
    main(*sys.argv[1:])
