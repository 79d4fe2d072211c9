"""How a sequence is cut: padded tokens of a chunk and of one rank's slice.

At degree 1 a rank holds the whole sequence. At degree D > 1 the sequence is cut into 2 D chunks and
rank j of the ring holds chunks j and 2 D - 1 - j, so that every rank has 1/D of the causal area.
"""

import numpy as np

from megatron_hdp.arrays import AnyArray, Int64Array


def chunks_of(member: int, degree: int) -> tuple[int, int]:
    """The head chunk and the tail chunk of a ring's member, of the 2 ``degree`` there are."""
    return member, 2 * degree - 1 - member


def chunk_tokens(length: int, degree: int, slice_multiple: int = 1) -> int:
    """Padded tokens of one of the 2 ``degree`` chunks; of the whole sequence at degree 1."""
    _check(length, degree, slice_multiple)
    chunk = length if degree == 1 else -(-length // (2 * degree))
    return -(-chunk // slice_multiple) * slice_multiple


def slice_tokens(length: int, degree: int, slice_multiple: int = 1) -> int:
    """Padded tokens of a sequence that one of ``degree`` ranks holds."""
    return (1 if degree == 1 else 2) * chunk_tokens(length, degree, slice_multiple)


def slice_tokens_array(lengths: Int64Array, degrees: Int64Array, slice_multiple: int) -> Int64Array:
    """``slice_tokens`` element by element."""
    chunks = np.where(degrees == 1, 1, 2 * degrees)
    chunk = -(-lengths // chunks)
    padded: AnyArray = -(-chunk // slice_multiple) * slice_multiple
    return padded * np.where(degrees == 1, 1, 2)


def _check(length: int, degree: int, slice_multiple: int) -> None:
    for name, value in (
        ("length", length),
        ("degree", degree),
        ("slice_multiple", slice_multiple),
    ):
        if value < 1:
            raise ValueError(f"{name} is {value}; expected at least 1")
