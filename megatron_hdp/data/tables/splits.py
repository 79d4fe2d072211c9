"""Which documents train, which validate and which test: Megatron's ``--split``."""

import re
from collections.abc import Sequence

import numpy as np

_MOST_WEIGHT = 1e300  # of all parts together: shares of it stay numbers
_SPLIT_NAMES = ("training", "validation", "test")


def split_documents(num_documents: int, split: str) -> tuple[range, range, range]:
    """Cut the documents into training, validation and test as Megatron's ``--split`` does.

    Args:
        num_documents: documents of the corpus.
        split: one to three weights such as ``"969,30,1"``; they are normalised, missing ones are 0.

    Raises:
        ValueError: the weights are malformed, too many, or all 0.
    """
    weights = _split_weights(split)
    # Megatron's arithmetic, step by step: other rounding would move documents between the parts.
    shares = (np.asarray(weights) / np.sum(weights)).tolist()
    borders, total = [0], 0.0
    for share in shares:
        total += share
        borders.append(int(round(total * float(num_documents))))
    return (
        range(borders[0], borders[1]),
        range(borders[1], borders[2]),
        range(borders[2], borders[3]),
    )


def _split_weights(split: str) -> Sequence[float]:
    parts = [part for part in re.split(r"[,\s]+", split.strip()) if part]
    valid = all(re.fullmatch(r"[0-9]+\.?[0-9]*|\.[0-9]+", part) for part in parts)
    in_number = 1 <= len(parts) <= len(_SPLIT_NAMES)
    if not valid or not in_number or not 0 < sum(map(float, parts)) <= _MOST_WEIGHT:
        raise ValueError(
            f"--split {split[:60]!r}: expected one to three weights for "
            f'{", ".join(_SPLIT_NAMES)}, at least one above 0, such as "969,30,1"'
        )
    weights = [float(part) for part in parts]
    return weights + [0.0] * (len(_SPLIT_NAMES) - len(weights))
