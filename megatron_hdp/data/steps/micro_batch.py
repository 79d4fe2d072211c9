"""What one rank holds of one micro-batch: its slices' tokens, labels, positions and loss mask.

A sequence of a ring of degree ``D`` is cut into ``2 D`` chunks; ring member ``i`` holds chunks
``i`` and ``2 D - 1 - i`` (head and tail), so that every member has the same causal area. Only the
tokens of those chunks, and one label token after each, are read, or a few more where the model
predicts further tokens: they lie on another rank, and in the file behind the chunk.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from megatron_hdp.arrays import AnyArray, BoolArray, Int64Array
from megatron_hdp.data.steps.share import RankShare
from megatron_hdp.planner import chunk_tokens
from megatron_hdp.planner.lockstep import PADDING
from megatron_hdp.planner.slices import chunks_of

FEWEST_TOKENS = 2
"""Of a micro-batch on one tensor rank: compilers make a case of its own of a dimension of size one,
and TransformerEngine cannot tell memory layouts apart by its stride."""


@dataclass(frozen=True, kw_only=True)
class RankMicroBatch:
    """One rank's part of one micro-batch; ring slices first, then whole sequences.

    Padding stands at the end of its sequence: token 0, label 0, no loss, positions counting on.
    Padding that belongs to no sequence is one more whole sequence at the end.
    """

    tokens: Int64Array
    labels: Int64Array
    positions: Int64Array
    """Each token's position in its own sequence."""
    loss_mask: BoolArray
    sequence_index: Int64Array
    """Place of each token's sequence in `sequence_ids`; -1 for padding."""
    ring: tuple[int, ...]
    """HDP ranks in ring order; this rank alone at degree 1."""
    ring_slices: tuple[int, ...] = ()
    """Padded tokens of each ring sequence's slice here: head chunk, tail chunk, of equal size."""
    local_lengths: tuple[int, ...]
    """Padded tokens of each whole sequence here."""
    sequence_ids: tuple[int, ...] = ()
    """Places in the step's sequences, ring slices first, then whole sequences."""
    sources: tuple[int, ...] = ()
    """Index of the source of each of them."""
    index: int | None = None
    """The micro-batch's index in the plan; None for padding."""
    corrupt_ids: tuple[int, ...] = ()
    """Those of `sequence_ids` that hold tokens outside the vocabulary here."""
    offload_ratio: float = 0.0
    further_labels: Int64Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """``[K t]``, depth by depth: of depth ``k`` the token ``k`` places behind each label."""
    further_mask: BoolArray = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    """``[K t]`` likewise: whether it carries loss."""

    def drop(self, sequence_ids: Collection[int]) -> None:
        """Take the tokens, labels and loss of these sequences out, as if they were padding."""
        begin = 0
        lengths = self.ring_slices + self.local_lengths
        for sequence, length in zip(self.sequence_ids, lengths, strict=False):
            if sequence in sequence_ids:
                for array in (self.tokens, self.labels, self.loss_mask):
                    array[begin : begin + length] = 0
                for further in (self.further_labels, self.further_mask):
                    if len(further):
                        further.reshape(-1, len(self.tokens))[:, begin : begin + length] = 0
                self.sequence_index[begin : begin + length] = -1
            begin += length


class TokenSource(Protocol):
    """Where the tokens of sequences come from."""

    def tokens(self, source: int, row: int, start: int, count: int) -> Int64Array:
        """Return tokens of a source's row from its token ``start`` on.

        Of a sequence whose last token has a label, the token behind it may be asked for.
        """

    def is_trained(self, source: int, row: int, start: int, stop: int) -> BoolArray:
        """Return which of the labelled tokens ``[start, stop)`` of a row have a trained label."""


@dataclass(frozen=True)
class Reader:
    """What one rank reads of a step."""

    hdp_rank: int
    vocab_size: int
    """Token ids must be below this."""
    reads_tokens: bool = True
    """Without it tokens and labels stay 0."""
    reads_mask: bool = True
    """Without it no token has loss, as between the first and the last pipeline stage."""
    token_multiple: int = 1
    """The number of a micro-batch's tokens is padded to a multiple of this."""
    num_further: int = 0
    """Tokens behind the label that are predicted, too (`RankMicroBatch.further_labels`)."""


@dataclass(frozen=True)
class Pieces:
    """What a rank reads of a step, ``[n]`` each: neighbouring tokens of one row."""

    sources: Int64Array
    rows: Int64Array
    starts: Int64Array
    counts: Int64Array
    """Tokens; the label of the last one is among them."""
    num_labelled: Int64Array
    """Tokens, from the first, whose label is asked for whether it is trained."""


def pieces_of(share: RankShare, num_further: int = 0) -> Pieces:
    """Return all that `read_micro_batch` asks its source for, over all slots of a share."""
    found = [
        _piece(run, share, num_further)
        for slot in range(share.num_slots)
        if share.indices[slot] != PADDING
        for run in _slot_runs(share, slot)[0]
    ]
    table = [
        (one.source, one.row, one.start, one.count, one.num_labelled) for one in found if one.count
    ]
    return Pieces(*np.array(table, dtype=np.int64).reshape(-1, 5).T)


def read_micro_batch(
    share: RankShare, slot: int, reader: Reader, source: TokenSource
) -> RankMicroBatch:
    """Read a rank's part of the micro-batch of a slot, and no other token."""
    fewest = FEWEST_TOKENS * reader.token_multiple
    if share.indices[slot] == PADDING:
        return padding_micro_batch(share.hdp_rank, fewest, reader.num_further)
    runs, chunks, wholes = _slot_runs(share, slot)
    begin, end = int(share.offsets[slot]), int(share.offsets[slot + 1])

    num_tokens = sum(run.num_tokens for run in runs)
    excess = max(-num_tokens % reader.token_multiple, fewest - num_tokens)
    tokens, labels, positions = np.zeros((3, num_tokens + excess), dtype=np.int64)
    loss_mask = np.zeros(num_tokens + excess, dtype=np.bool_)
    further = reader.num_further
    further_labels = np.zeros((further, num_tokens + excess), dtype=np.int64)
    further_mask = np.zeros((further, num_tokens + excess), dtype=np.bool_)
    positions[num_tokens:] = np.arange(excess)
    corrupt: list[int] = []
    first = 0
    for run in runs:
        here = slice(first, first + run.num_tokens)
        positions[here] = np.arange(run.first, run.first + run.num_tokens)
        piece = _piece(run, share, further)
        if reader.reads_mask and piece.num_labelled:
            trained = source.is_trained(
                piece.source, piece.row, piece.start, piece.start + piece.num_labelled
            )
            for mask, of_depth in _by_depth(trained, here, loss_mask, further_mask):
                mask[:] = of_depth
        if reader.reads_tokens and piece.num_held:
            read = source.tokens(piece.source, piece.row, piece.start, piece.count)
            tokens[here][: piece.num_held] = read[: piece.num_held]
            behind = read[1 : piece.num_labelled + 1]
            for array, of_depth in _by_depth(behind, here, labels, further_labels):
                array[:] = of_depth
            sequence_id = int(share.ids[run.i])
            is_good = read.min() >= 0 and read.max() < reader.vocab_size
            if not is_good and sequence_id not in corrupt:
                corrupt.append(sequence_id)
        first = here.stop
    sequence_index = np.full(num_tokens + excess, -1, dtype=np.int64)
    places = np.arange(end - begin).repeat([2 * chunk for chunk in chunks] + wholes)
    is_real = positions[:num_tokens] < share.lengths[begin:end][places]
    sequence_index[:num_tokens][is_real] = places[is_real]
    return RankMicroBatch(
        tokens=tokens,
        labels=labels,
        positions=positions,
        loss_mask=loss_mask,
        sequence_index=sequence_index,
        ring=share.ring_of(slot),
        ring_slices=tuple(2 * chunk for chunk in chunks),
        local_lengths=(*wholes, excess) if excess else tuple(wholes),
        sequence_ids=tuple(share.ids[begin:end].tolist()),
        sources=tuple(share.sources[begin:end].tolist()),
        index=int(share.indices[slot]),
        corrupt_ids=tuple(corrupt),
        offload_ratio=float(share.offload_ratios[slot]),
        further_labels=further_labels.ravel(),
        further_mask=further_mask.ravel(),
    )


def _by_depth(
    values: AnyArray, here: slice, first: AnyArray, others: AnyArray
) -> Iterator[tuple[AnyArray, AnyArray]]:
    """Of labels and each depth behind them where values go, and those that go there."""
    for depth, array in enumerate((first, *others)):
        room = array[here]
        of_depth = values[depth : depth + len(room)]
        yield room[: len(of_depth)], of_depth


def padding_micro_batch(
    rank: int, num_tokens: int = FEWEST_TOKENS, num_further: int = 0
) -> RankMicroBatch:
    """Return padding without loss: what a rank runs in a slot for which the plan has nothing."""
    return RankMicroBatch(
        tokens=np.zeros(num_tokens, dtype=np.int64),
        labels=np.zeros(num_tokens, dtype=np.int64),
        positions=np.arange(num_tokens),
        loss_mask=np.zeros(num_tokens, dtype=np.bool_),
        sequence_index=np.full(num_tokens, -1, dtype=np.int64),
        ring=(rank,),
        local_lengths=(num_tokens,),
        further_labels=np.zeros(num_further * num_tokens, dtype=np.int64),
        further_mask=np.zeros(num_further * num_tokens, dtype=np.bool_),
    )


@dataclass(frozen=True)
class _Run:
    """Neighbouring tokens of the share's sequence ``i``: ``num_tokens`` from ``first``, padded."""

    i: int
    first: int
    num_tokens: int


def _slot_runs(share: RankShare, slot: int) -> tuple[list[_Run], list[int], list[int]]:
    """Return a slot's runs, and tokens of a chunk of each ring sequence and of each whole one."""
    ring = share.ring_of(slot)
    begin, end = int(share.offsets[slot]), int(share.offsets[slot + 1])
    border = begin + int(share.num_sharded[slot])
    multiple = share.slice_multiple
    sharded, whole = share.lengths[begin:border].tolist(), share.lengths[border:end].tolist()
    chunks = [chunk_tokens(length, len(ring), multiple) for length in sharded]
    wholes = [chunk_tokens(length, 1, multiple) for length in whole]
    runs = []
    head, tail = chunks_of(ring.index(share.hdp_rank), len(ring))
    for i, chunk in enumerate(chunks, begin):
        runs += [_Run(i, head * chunk, chunk), _Run(i, tail * chunk, chunk)]
    runs += [_Run(i, 0, size) for i, size in enumerate(wholes, border)]
    return runs, chunks, wholes


@dataclass(frozen=True)
class _Piece:
    """What is read for a run: neighbouring tokens of one row."""

    source: int
    row: int
    start: int
    num_held: int
    """Tokens of the run that are no padding."""
    num_labelled: int
    """Tokens from the first of them on that have a label, up to `num_further` behind the run."""

    @property
    def count(self) -> int:
        """Tokens to read: the label of the last one is the token after it."""
        return max(self.num_held, self.num_labelled + 1) if self.num_held else 0


def _piece(run: _Run, share: RankShare, num_further: int) -> _Piece:
    held = min(max(int(share.lengths[run.i]) - run.first, 0), run.num_tokens)
    labelled = max(int(share.num_labels[run.i]) - run.first, 0)
    return _Piece(
        source=int(share.sources[run.i]),
        row=int(share.rows[run.i]),
        start=int(share.starts[run.i]) + run.first,
        num_held=held,
        num_labelled=min(labelled, run.num_tokens + num_further) if held else 0,
    )
