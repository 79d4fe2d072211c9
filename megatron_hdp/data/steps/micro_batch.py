"""What one rank holds of one micro-batch: its slices' tokens, labels, positions and loss mask.

A sequence of a ring of degree ``D`` is cut into ``2 D`` chunks; ring member ``i`` holds chunks
``i`` and ``2 D - 1 - i`` (head and tail), so that every member has the same causal area. Only the
tokens of those chunks, and one label token after each, are read, or a few more where the model
predicts further tokens: they lie on another rank, and in the file behind the chunk.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from megatron_hdp.arrays import AnyArray, BoolArray, Int64Array
from megatron_hdp.data.steps.share import RankShare
from megatron_hdp.planner import chunk_tokens
from megatron_hdp.planner.lockstep import PADDING
from megatron_hdp.planner.parts import Piece, cut_in_parts
from megatron_hdp.planner.slices import chunks_of

FEWEST_TOKENS = 2
"""Of a micro-batch on one tensor rank: compilers make a case of its own of a dimension of size one,
and TransformerEngine cannot tell memory layouts apart by its stride."""


class Part(NamedTuple):
    """What a part of a micro-batch holds on a rank: ring slices first, then what is whole there.

    Its pieces are next in the micro-batch's `ring_slices` and `local_lengths`.
    """

    num_ring_slices: int
    num_local: int
    """Padding that belongs to no sequence counts as one, the last."""
    continues_ring: bool
    """Whether its first ring slice is of the sequence that the part before ends with."""
    continues_local: bool
    """Likewise, its first sequence without a ring."""
    padding: int
    """Tokens at its end that belong to no sequence."""


@dataclass(frozen=True, kw_only=True)
class RankMicroBatch:
    """One rank's share of one micro-batch; ring slices first, then whole sequences.

    Padding stands at the end of its sequence: token 0, label 0, no loss, positions counting on.
    Padding that belongs to no sequence is one more whole sequence at the end. Where it runs in
    parts (`planner.parts`), tokens lie part by part, and a slice or length is that of a piece.
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
    parts: tuple[Part, ...] = ()
    """In the order of their tokens; empty where it runs whole."""
    is_stream: bool = False
    """Whether they keep only keys and values, and are computed again in backward."""
    is_recomputed: bool = False
    """Whether it keeps the inputs of layers alone, and backward computes them again."""
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
    axis_positions: Int64Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """``[3 t]``, axis by axis: positions in time, height and width, where these may differ."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(Part(*one) for one in self.parts))

    @property
    def num_on_ring(self) -> int:
        """Of its sequences, the first ones, that are sharded over the ring."""
        return len(self.ring_slices) - sum(part.continues_ring for part in self.parts)

    def in_parts(self) -> list["RankMicroBatch"]:
        """Return each part as a micro-batch that runs whole; itself if it does."""
        if not self.parts:
            return [self]
        found, begin, slices, lengths = [], 0, self.ring_slices, self.local_lengths
        for part in self.parts:
            of_ring, slices = slices[: part.num_ring_slices], slices[part.num_ring_slices :]
            of_rank, lengths = lengths[: part.num_local], lengths[part.num_local :]
            rows = slice(begin, begin + sum(of_ring) + sum(of_rank))
            begin = rows.stop
            changes: dict[str, Any] = {
                name: array.reshape(-1, len(self.tokens))[:, rows].ravel()
                for name, array in vars(self).items()
                if isinstance(array, np.ndarray)
            }
            changes |= {"ring_slices": of_ring, "local_lengths": of_rank, "parts": ()}
            found.append(replace(self, **changes))
        return found

    def drop(self, sequence_ids: Collection[int]) -> None:
        """Take the tokens, labels and loss of these sequences out, as if they were padding."""
        places = [i for i, one in enumerate(self.sequence_ids) if one in sequence_ids]
        gone = np.isin(self.sequence_index, places)
        for array in (self.tokens, self.labels, self.loss_mask):
            array[gone] = 0
        for further in (self.further_labels, self.further_mask):
            if len(further):
                further.reshape(-1, len(self.tokens))[:, gone] = 0
        self.sequence_index[gone] = -1


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
        for part in _parts_of(share, slot)
        for run in part.runs
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
    begin, end = int(share.offsets[slot]), int(share.offsets[slot + 1])
    parts = _parts_of(share, slot)
    for part in parts:
        part.pad(reader.token_multiple, fewest)
    num_tokens = sum(part.num_tokens for part in parts)
    tokens, labels, positions = np.zeros((3, num_tokens), dtype=np.int64)
    loss_mask = np.zeros(num_tokens, dtype=np.bool_)
    sequence_index = np.full(num_tokens, -1, dtype=np.int64)
    further = reader.num_further
    further_labels = np.zeros((further, num_tokens), dtype=np.int64)
    further_mask = np.zeros((further, num_tokens), dtype=np.bool_)
    corrupt: list[int] = []
    first = 0
    for part in parts:
        for run in part.runs:
            here = slice(first, first + run.num_tokens)
            first = here.stop
            positions[here] = np.arange(run.first, run.first + run.num_tokens)
            piece = _piece(run, share, further)
            sequence_index[here][: piece.num_held] = run.i - begin
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
        positions[first : first + part.padding] = np.arange(part.padding)
        first += part.padding
    return RankMicroBatch(
        tokens=tokens,
        labels=labels,
        positions=positions,
        loss_mask=loss_mask,
        sequence_index=sequence_index,
        ring=share.ring_of(slot),
        ring_slices=tuple(size for part in parts for size in part.ring_slices),
        local_lengths=tuple(size for part in parts for size in part.local_lengths),
        parts=tuple(part.told() for part in parts) if len(parts) > 1 else (),
        is_stream=bool(share.streams[slot]),
        is_recomputed=bool(share.recomputed[slot]),
        sequence_ids=tuple(share.ids[begin:end].tolist()),
        sources=tuple(share.sources[begin:end].tolist()),
        index=None if share.indices[slot] == PADDING else int(share.indices[slot]),
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


@dataclass
class _Part:
    """A slot's runs of one part, and the padded tokens of its slices and whole sequences."""

    runs: list[_Run]
    ring_slices: list[int]
    local_lengths: list[int]
    continues_ring: bool
    continues_local: bool
    padding: int = 0

    @property
    def num_tokens(self) -> int:
        """Packed tokens, padding included."""
        return sum(self.ring_slices) + sum(self.local_lengths)

    def pad(self, multiple: int, fewest: int) -> None:
        """Add padding that belongs to no sequence."""
        self.padding = max(-self.num_tokens % multiple, fewest - self.num_tokens)
        if self.padding:
            self.local_lengths.append(self.padding)

    def told(self) -> Part:
        """Return what a micro-batch says of it."""
        sizes = len(self.ring_slices), len(self.local_lengths)
        return Part(*sizes, self.continues_ring, self.continues_local, self.padding)


def _parts_of(share: RankShare, slot: int) -> list[_Part]:
    """Return what a slot holds, part by part; of one that runs whole the only part."""
    ring = share.ring_of(slot)
    begin, end = int(share.offsets[slot]), int(share.offsets[slot + 1])
    border = begin + int(share.num_sharded[slot])
    multiple, num_parts = share.slice_multiple, int(share.num_parts[slot])
    linear_tokens = math.inf if share.streams[slot] else share.linear_tokens
    sharded, whole = (
        cut_in_parts(share.lengths[these].tolist(), num_parts, unit, linear_tokens)
        for these, unit in (
            (slice(begin, border), 2 * len(ring) * multiple),
            (slice(border, end), multiple),
        )
    )
    head, tail = chunks_of(ring.index(share.hdp_rank), len(ring))
    parts = []
    for of_ring, of_rank in zip(sharded, whole, strict=True):
        runs, slices, lengths = [], [], []
        for i, first, stop in of_ring:
            chunk = chunk_tokens(stop - first, len(ring), multiple)
            slices.append(2 * chunk)
            runs += [_Run(begin + i, first + one * chunk, chunk) for one in (head, tail)]
        for i, first, stop in of_rank:
            lengths.append(chunk_tokens(stop - first, 1, multiple))
            runs.append(_Run(border + i, first, lengths[-1]))
        parts.append(_Part(runs, slices, lengths, _continues(of_ring), _continues(of_rank)))
    return parts + [_Part([], [], [], False, False) for _ in range(share.padding_parts[slot])]


def _continues(pieces: list[Piece]) -> bool:
    return bool(pieces) and pieces[0].first > 0


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
