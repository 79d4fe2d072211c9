"""Rows of items on their way: from the ranks that encode them to those whose tokens they are.

Every rank knows all of it from the plan, so none asks another one how much will come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import Int32Array, Int64Array


def rows_of_tokens(num_tokens: int, places: Int64Array, counts: Int64Array) -> Int64Array:
    """Return the row that stands for each token of a step, -1 where none does, ``[num_tokens]``.

    Args:
        num_tokens: of the step's sequences, one behind another.
        places: of each item's first row among these tokens, ``[items]``.
        counts: of each item's rows, ``[items]``; rows are numbered item after item.

    Raises:
        ValueError: two items share a token.
    """
    found = np.full(num_tokens, -1, dtype=np.int64)
    total = int(counts.sum())
    before = np.cumsum(counts) - counts
    tokens = np.repeat(places - before, counts) + np.arange(total)
    found[tokens] = np.arange(total)
    if int((found >= 0).sum()) < total:
        lost = int(np.flatnonzero(found[tokens] != np.arange(total))[0])
        item = int(np.searchsorted(before, lost, side="right")) - 1
        raise ValueError(f"item {item} shares tokens with another one: give each its own rows")
    return found


@dataclass(frozen=True)
class RowExchange:
    """One rank's part of one exchange of rows; back it is the same, turned round."""

    send: Int64Array
    """Places among the rows that this rank makes, in the order in which they leave, ``[sent]``."""
    send_counts: list[int]
    """Rows that go to each rank of the job."""
    receive: Int64Array
    """The numbers of the rows that this rank wants, in the order in which they come."""
    receive_counts: list[int]
    """Rows that come from each rank of the job."""


def row_exchange(
    rank: int, wanted: Sequence[Int64Array], makers: Int32Array, made: Int64Array
) -> RowExchange:
    """Return what a rank sends and receives.

    Args:
        rank: this one.
        wanted: by each rank of the job, rows in the order of its tokens.
        makers: the rank that encodes each row, ``[rows]``.
        made: rows that this rank encodes, in the order in which it has them.
    """
    place = np.full(len(makers), -1, dtype=np.int64)
    place[made] = np.arange(len(made))
    sent = [rows[makers[rows] == rank] for rows in wanted]
    mine = makers[wanted[rank]]
    return RowExchange(
        send=place[np.concatenate(sent)] if sent else np.zeros(0, dtype=np.int64),
        send_counts=[len(one) for one in sent],
        receive=wanted[rank][np.argsort(mine, kind="stable")],
        receive_counts=np.bincount(mine, minlength=len(wanted)).tolist(),
    )
