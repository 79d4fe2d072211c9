"""A rank's share of a planned step: its micro-batches and what is known of their sequences.

So a rank, or the node that it is on, hears of its own sequences alone, however many ranks and
sequences a step has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from megatron_hdp.arrays import Float64Array, Int64Array
from megatron_hdp.data.mixture import Step
from megatron_hdp.planner import CostModel, Plan
from megatron_hdp.planner.bounds import attention_s, block_s
from megatron_hdp.planner.lockstep import (
    PADDING,
    begin_together,
    end_together,
    padding_parts,
    parts_of,
    slots,
    streams_of,
)

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
    ends_together: bool
    """See `planner.lockstep.end_together`."""
    begins_together: bool
    """See `planner.lockstep.begin_together`; equal on all ranks."""
    linear_tokens: float
    """See `FlatPlan.linear_tokens`."""
    indices: Int64Array
    """Of each slot's micro-batch in the plan; `PADDING` for padding."""
    num_parts: Int64Array
    """In how many parts each slot runs."""
    padding_parts: Int64Array
    """Parts of padding behind them, see `planner.lockstep.padding_parts`."""
    streams: Int64Array
    """1 where they are those of a stream, else 0, see `planner.lockstep.streams_of`."""
    recomputed: Int64Array
    """1 where the micro-batch is recomputed in backward, layer by layer, else 0."""
    offload_ratios: Float64Array
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
    def num_padding(self) -> int:
        """Slots that hold no micro-batch."""
        return int((self.indices == PADDING).sum())

    def ring_of(self, slot: int) -> tuple[int, ...]:
        """Return the ranks of a slot's ring, in order."""
        return tuple(self.ring[self.ring_offsets[slot] : self.ring_offsets[slot + 1]].tolist())

    def place_of(self, sequence_id: int) -> int:
        """Return where in the columns a sequence of this share stands."""
        return int(np.flatnonzero(self.ids == sequence_id)[0])


class StepShares:
    """Cuts a planned step into the shares of its ranks, some at a time."""

    def __init__(
        self,
        step: Step,
        plan: Plan,
        *,
        is_aligned: bool = False,
        lockstep_ranks: int = 1,
        group_size: int = 1,
    ) -> None:
        """Look at the step once; its plan's sequence ids are places in it.

        The others are arguments of `planner.lockstep.slots`.

        Raises:
            ValueError: the plan is for other sequences.
        """
        _require_lengths(step, plan)
        self._step = step
        self._plan = plan
        self._slots = slots(
            plan, aligned=is_aligned, lockstep_ranks=lockstep_ranks, group_size=group_size
        )
        self._end_together = end_together(plan, self._slots, lockstep_ranks=lockstep_ranks)
        self._begin_together = begin_together(plan, self._slots)
        self._padding_parts = padding_parts(plan, self._slots, lockstep_ranks=lockstep_ranks)
        self._streams = streams_of(plan, self._slots, lockstep_ranks=lockstep_ranks)
        members = np.append(plan.ranks, [PADDING])  # a padding slot's ring is its rank alone
        self._members = members.astype(np.int64)
        owners = np.repeat(np.arange(plan.num_micro_batches), np.diff(plan.local_offsets))
        self._locals = owners * plan.num_ranks + plan.local_ranks  # ascending

    def of(self, ranks: Sequence[int]) -> list[RankShare]:
        """Return the shares of some HDP ranks."""
        if not ranks:
            return []
        plan = self._plan
        counts = [len(self._slots[rank]) for rank in ranks]
        indices = np.concatenate([self._slots[rank] for rank in ranks])
        owners = np.repeat(np.array(ranks, dtype=np.int64), counts)
        is_padding = indices == PADDING
        m = np.where(is_padding, 0, indices)

        first = np.where(is_padding, len(plan.ranks), plan.rank_offsets[m])
        sizes = np.where(is_padding, 1, plan.rank_offsets[m + 1] - plan.rank_offsets[m])
        ring = self._members[_ranges(first, sizes)]
        ring[ring == PADDING] = owners[is_padding]

        num_sequences = plan.sequence_offsets[m + 1] - plan.sequence_offsets[m]
        num_sequences[is_padding] = 0
        wanted = m * plan.num_ranks + owners
        begins = np.searchsorted(self._locals, wanted, side="left")
        num_local = np.searchsorted(self._locals, wanted, side="right") - begins
        num_local[is_padding] = 0
        totals = num_sequences + num_local
        starts = np.cumsum(totals) - totals
        ids = np.empty(int(totals.sum()), dtype=np.int64)
        ids[_ranges(starts, num_sequences)] = plan.sequences[
            _ranges(plan.sequence_offsets[m], num_sequences)
        ]
        ids[_ranges(starts + num_sequences, num_local)] = plan.local_sequences[
            _ranges(begins, num_local)
        ]
        columns = {name: getattr(self._step, name)[ids] for name in _COLUMNS}
        num_sharded = np.where(sizes > 1, num_sequences, 0)
        ratios = np.where(is_padding, 0.0, plan.offload_ratios[m])
        num_parts = parts_of(plan, indices)
        of_padding = np.concatenate([self._padding_parts[rank] for rank in ranks])
        streams = np.concatenate([self._streams[rank] for rank in ranks])
        recomputed = np.where(is_padding, 0, plan.is_recomputed[m].astype(np.int64))

        slot_offsets, of_rings, of_ids = _offsets(counts), _offsets(sizes), _offsets(totals)
        shares = []
        for rank, begin, end in zip(ranks, slot_offsets[:-1], slot_offsets[1:], strict=True):
            here = slice(begin, end)
            mine = slice(of_ids[begin], of_ids[end])
            shares.append(
                RankShare(
                    hdp_rank=rank,
                    slice_multiple=plan.slice_multiple,
                    ends_together=bool(self._end_together[rank]),
                    begins_together=self._begin_together,
                    linear_tokens=plan.linear_tokens,
                    indices=indices[here],
                    num_parts=num_parts[here],
                    padding_parts=of_padding[here],
                    streams=streams[here],
                    recomputed=recomputed[here],
                    offload_ratios=ratios[here],
                    ring_offsets=of_rings[begin : end + 1] - of_rings[begin],
                    ring=ring[of_rings[begin] : of_rings[end]],
                    offsets=of_ids[begin : end + 1] - of_ids[begin],
                    num_sharded=num_sharded[here],
                    ids=ids[mine],
                    **{name: column[mine] for name, column in columns.items()},
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


def _offsets(counts: npt.ArrayLike) -> Int64Array:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def work_of(share: RankShare, cost_model: CostModel, num_stages: int = 1) -> Float64Array:
    """Return what one rank of speed 1 computes in a step.

    Returns:
        Seconds of attention with its blocks, seconds of what is linear in the length, number of
        micro-batches, or of their parts; shape (3,). ``g`` and traffic are not part of it.
    """
    slots = np.arange(share.num_slots)
    degrees = np.diff(share.ring_offsets)
    counts = np.diff(share.offsets)
    owners = np.repeat(slots, counts)
    is_sharded = np.arange(len(owners)) - share.offsets[owners] < share.num_sharded[owners]
    parts = np.where(is_sharded, degrees[owners], 1)
    times = 1 + (share.streams + share.recomputed) / 3  # a third is forward, which runs twice
    attention = float((attention_s(share.lengths, cost_model) / parts * times[owners]).sum())
    linear = cost_model.linear_s_per_token * float((share.lengths / parts * times[owners]).sum())
    has_local = (degrees > 1) & (counts > share.num_sharded)
    # a later part meets, step by step, keys of earlier ones beside its own
    num_parts = share.num_parts
    blocks = float((times * ((2 * num_parts - 1) * degrees + num_parts * has_local)).sum())
    attention += blocks * block_s(cost_model, num_stages)
    return np.array([attention, linear, float(num_parts.sum())])


_ARRAYS = tuple(one.name for one in fields(RankShare))[5:]
_KINDS = (np.uint8, np.int32)


@dataclass(frozen=True)
class PackedShares:
    """The arrays of shares, each column over all ranks at once, in the narrowest integers."""

    hdp_ranks: tuple[int, ...]
    slice_multiples: tuple[int, ...]
    end_together: tuple[bool, ...]
    begin_together: tuple[bool, ...]
    linear_tokens: tuple[float, ...]
    sizes: bytes
    """``int32[arrays, ranks]``: how much of each column is each rank's."""
    columns: tuple[tuple[str, bytes], ...]
    """Kind of number and contents of each array."""

    @classmethod
    def of(cls, shares: Sequence[RankShare]) -> PackedShares:
        """Return these shares, packed."""
        sizes, columns = [], []
        for name in _ARRAYS:
            arrays = [getattr(one, name) for one in shares]
            sizes.append([len(one) for one in arrays])
            column = _narrow(np.concatenate(arrays)) if arrays else np.zeros(0, dtype=np.uint8)
            columns.append((column.dtype.str, column.tobytes()))
        return cls(
            tuple(one.hdp_rank for one in shares),
            tuple(one.slice_multiple for one in shares),
            tuple(one.ends_together for one in shares),
            tuple(one.begins_together for one in shares),
            tuple(one.linear_tokens for one in shares),
            np.array(sizes, dtype=np.int32).tobytes(),
            tuple(columns),
        )

    def unpack(self) -> list[RankShare]:
        """Return the shares, the same to the bit."""
        sizes = np.frombuffer(self.sizes, dtype=np.int32).reshape(len(_ARRAYS), -1)
        found: list[dict[str, npt.NDArray[np.generic]]] = [{} for _ in self.hdp_ranks]
        for name, row, (kind, contents) in zip(_ARRAYS, sizes, self.columns, strict=True):
            wide = np.float64 if name == "offload_ratios" else np.int64
            column = np.frombuffer(contents, dtype=kind).astype(wide)
            ends = np.cumsum(row)
            for one, begin, end in zip(found, (ends - row).tolist(), ends.tolist(), strict=True):
                one[name] = column[begin:end]
        return [
            RankShare(*scalars, **arrays)
            for *scalars, arrays in zip(
                self.hdp_ranks,
                self.slice_multiples,
                self.end_together,
                self.begin_together,
                self.linear_tokens,
                found,
                strict=True,
            )
        ]


def _narrow(column: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return the same numbers in fewer bytes, where they are integers that fit."""
    if column.dtype != np.int64 or not len(column):
        return column
    numbers: Int64Array = column.astype(np.int64, copy=False)
    least, most = int(numbers.min()), int(numbers.max())
    for kind in _KINDS:
        limits = np.iinfo(kind)
        if limits.min <= least and most <= limits.max:
            return numbers.astype(kind)
    return column
