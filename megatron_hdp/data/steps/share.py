"""A rank's share of a planned step: its micro-batches and what is known of their sequences.

So a rank, or the node that it is on, hears of its own sequences alone, however many ranks and
sequences a step has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from megatron_hdp.data.index_file import Int64Array
from megatron_hdp.data.mixture import Step
from megatron_hdp.planner import Plan
from megatron_hdp.planner.lockstep import PADDING, slots

_COLUMNS = ("sources", "rows", "starts", "lengths", "num_labels", "num_loss_tokens")


@dataclass(frozen=True)
class RankShare:
    """What one HDP rank runs, slot by slot; a slot is a micro-batch of the plan or padding.

    Slot ``s`` owns ``ring[ring_offsets[s]:ring_offsets[s + 1]]`` and the sequences from
    ``offsets[s]`` to ``offsets[s + 1]``: those that are sharded over the ring first, then whole
    ones.
    """

    hdp_rank: int
    slice_multiple: int
    indices: Int64Array
    """Of each slot's micro-batch in the plan; `PADDING` for padding."""
    offload_ratios: npt.NDArray[np.float64]
    ring_offsets: Int64Array
    ring: Int64Array
    """HDP ranks in ring order."""
    offsets: Int64Array
    num_sharded: Int64Array
    """Of each slot's sequences."""
    ids: Int64Array
    """Place of each sequence in the step; so are the columns of `Step` that follow."""
    sources: Int64Array
    rows: Int64Array
    starts: Int64Array
    lengths: Int64Array
    num_labels: Int64Array
    num_loss_tokens: Int64Array

    @property
    def num_slots(self) -> int:
        """Micro-batches, padding included."""
        return len(self.indices)

    @property
    def num_bytes(self) -> int:
        """What its arrays take."""
        return sum(getattr(self, one.name).nbytes for one in fields(self)[2:])

    def ring_of(self, slot: int) -> tuple[int, ...]:
        """Return the ranks of a slot's ring, in order."""
        return tuple(self.ring[self.ring_offsets[slot] : self.ring_offsets[slot + 1]].tolist())

    def place_of(self, sequence_id: int) -> int:
        """Return where in the columns a sequence of this share stands."""
        return int(np.flatnonzero(self.ids == sequence_id)[0])


def shares_of(
    step: Step,
    plan: Plan,
    ranks: Sequence[int],
    *,
    is_aligned: bool = False,
    lockstep_ranks: int = 1,
) -> list[RankShare]:
    """Return the shares of some ranks.

    Args:
        step: what was drawn.
        plan: of it; its sequence ids are places in the step.
        ranks: HDP ranks.
        is_aligned: see `planner.lockstep.slots`.
        lockstep_ranks: likewise.

    Raises:
        ValueError: the plan is for other sequences.
    """
    _require_lengths(step, plan)
    of_ranks = slots(plan, aligned=is_aligned, lockstep_ranks=lockstep_ranks)
    mine = [of_ranks[rank] for rank in ranks]
    counts = [len(one) for one in mine]
    indices = np.concatenate([np.zeros(0, np.int64), *mine])
    owners = np.repeat(np.array(ranks, dtype=np.int64), counts)
    is_padding = indices == PADDING
    m = np.where(is_padding, 0, indices)

    first = np.where(is_padding, len(plan.ranks), plan.rank_offsets[m])
    sizes = np.where(is_padding, 1, np.diff(plan.rank_offsets)[m])
    padded = np.append(plan.ranks, [PADDING])  # a padding slot's ring is its rank alone
    ring = padded[_ranges(first, sizes)].astype(np.int64)
    ring[ring == PADDING] = owners[is_padding]

    num_sequences = np.where(is_padding, 0, np.diff(plan.sequence_offsets)[m])
    keys = _owners(plan.local_offsets) * plan.num_ranks + plan.local_ranks  # ascending
    wanted = m * plan.num_ranks + owners
    begins = np.searchsorted(keys, wanted, side="left")
    num_local = np.searchsorted(keys, wanted, side="right") - begins
    num_local[is_padding] = 0
    totals = num_sequences + num_local
    ids = np.empty(int(totals.sum()), dtype=np.int64)
    starts = np.cumsum(totals) - totals
    ids[_ranges(starts, num_sequences)] = plan.sequences[
        _ranges(plan.sequence_offsets[m], num_sequences)
    ]
    ids[_ranges(starts + num_sequences, num_local)] = plan.local_sequences[
        _ranges(begins, num_local)
    ]
    num_sharded = np.where(sizes > 1, num_sequences, 0)
    ratios = np.where(is_padding, 0.0, plan.offload_ratios[m])
    columns = {name: getattr(step, name)[ids] for name in _COLUMNS}

    slot_ends, ring_ends, ends = (np.cumsum(one) for one in (counts, sizes, totals))
    shares = []
    for rank, stop, count in zip(ranks, slot_ends.tolist(), counts, strict=True):
        here = slice(stop - count, stop)
        of_ring = slice(int(ring_ends[here.start] - sizes[here.start]), int(ring_ends[stop - 1]))
        of_ids = slice(int(ends[here.start] - totals[here.start]), int(ends[stop - 1]))
        shares.append(
            RankShare(
                hdp_rank=rank,
                slice_multiple=plan.slice_multiple,
                indices=indices[here],
                offload_ratios=ratios[here],
                ring_offsets=_offsets(sizes[here]),
                ring=ring[of_ring],
                offsets=_offsets(totals[here]),
                num_sharded=num_sharded[here],
                ids=ids[of_ids],
                **{name: column[of_ids] for name, column in columns.items()},
            )
        )
    return shares


def _require_lengths(step: Step, plan: Plan) -> None:
    if np.array_equal(plan.lengths, step.lengths):
        return
    raise ValueError(
        f"found a plan for {len(plan.lengths):,} sequences of {int(plan.lengths.sum()):,} tokens, "
        f"expected one for the step's {len(step):,} of {step.tokens:,}: the plan was made for "
        "another step"
    )


def _ranges(starts: Int64Array, counts: Int64Array) -> Int64Array:
    """Return ``start, start + 1, ..`` of each, ``count`` of them, one after another."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))


def _owners(offsets: Int64Array) -> Int64Array:
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def _offsets(counts: Int64Array) -> Int64Array:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
