"""What one rank holds of one micro-batch: its slices' tokens, labels, positions and loss mask.

A sequence of a ring of degree ``D`` is cut into ``2 D`` chunks; ring member ``i`` holds chunks
``i`` and ``2 D - 1 - i`` (head and tail), so that every member has the same causal area. Only the
tokens of those chunks, and one label token after each, are read.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hdp.data.index_file import Int64Array
from megatron_hdp.data.sequences import Sequences
from megatron_hdp.data.token_file import TokenReader
from megatron_hdp.planner import Plan, chunk_tokens


@dataclass(frozen=True)
class RankMicroBatch:
    """One rank's part of one micro-batch; ring slices first, then whole sequences.

    Padding stands at the end of its sequence: token 0, label 0, no loss, positions counting on.
    Padding that belongs to no sequence is one more whole sequence at the end.
    """

    tokens: Int64Array
    labels: Int64Array
    positions: Int64Array
    """Each token's position in its own sequence."""
    loss_mask: npt.NDArray[np.bool_]
    sequence_index: Int64Array
    """Place of each token's sequence in `sequence_ids`; -1 for padding."""
    ring: tuple[int, ...]
    """HDP ranks in ring order; this rank alone at degree 1."""
    ring_slices: tuple[int, ...]
    """Padded tokens of each ring sequence's slice here: head chunk, tail chunk, of equal size."""
    local_lengths: tuple[int, ...]
    """Padded tokens of each whole sequence here."""
    sequence_ids: tuple[int, ...]
    """Rows of the sequence table, ring slices first, then whole sequences."""
    index: int | None
    """The micro-batch's index in the plan; None for padding."""
    corrupt_ids: tuple[int, ...]
    """Those of `sequence_ids` that hold tokens outside the vocabulary here."""
    offload_ratio: float

    def drop(self, sequence_ids: Collection[int]) -> None:
        """Take the tokens, labels and loss of these sequences out, as if they were padding."""
        begin = 0
        lengths = self.ring_slices + self.local_lengths
        for row, length in zip(self.sequence_ids, lengths, strict=False):
            if row in sequence_ids:
                for array in (self.tokens, self.labels, self.loss_mask):
                    array[begin : begin + length] = 0
                self.sequence_index[begin : begin + length] = -1
            begin += length


def read_micro_batch(
    plan: Plan,
    m: int,
    rank: int,
    step_sequences: Int64Array,
    table: Sequences,
    reader: TokenReader | None,
    *,
    vocab_size: int,
    token_multiple: int = 1,
) -> RankMicroBatch:
    """Read this rank's part of micro-batch ``m``, and nothing else, from the token file.

    Args:
        plan: the step's plan; its sequence ids are indices into ``step_sequences``.
        m: micro-batch index.
        rank: HDP rank, a member of the micro-batch.
        step_sequences: rows of ``table``, as drawn by the sampler.
        table: the sequences.
        reader: of their tokens; without it tokens and labels stay 0.
        vocab_size: token ids must be below this.
        token_multiple: the number of tokens is padded to a multiple of this.

    Raises:
        ValueError: the rank takes no part in the micro-batch, or the plan is for other sequences.
    """
    micro_batch = plan.micro_batch(m)
    if rank not in micro_batch.ranks:
        raise ValueError(
            f"rank {rank} takes no part in micro-batch {m}, whose ring is {micro_batch.ranks}"
        )
    degree = len(micro_batch.ranks)
    sharded = micro_batch.sequences if degree > 1 else ()
    whole = micro_batch.local.get(rank, ())
    if degree == 1:
        whole = micro_batch.sequences + whole
    held = _held(plan, (*sharded, *whole), step_sequences, table)
    in_ring, in_whole = held[: len(sharded)], held[len(sharded) :]
    chunks = [chunk_tokens(one.length, degree, plan.slice_multiple) for one in in_ring]
    wholes = [chunk_tokens(one.length, 1, plan.slice_multiple) for one in in_whole]

    head = micro_batch.ranks.index(rank)
    tail = 2 * degree - 1 - head
    runs: list[_Run] = []
    for one, chunk in zip(in_ring, chunks, strict=True):
        runs += [_Run(one, head * chunk, chunk), _Run(one, tail * chunk, chunk)]
    runs += [_Run(one, 0, size) for one, size in zip(in_whole, wholes, strict=True)]

    num_tokens = sum(run.num_tokens for run in runs)
    excess = -num_tokens % token_multiple
    tokens, labels, positions = np.zeros((3, num_tokens + excess), dtype=np.int64)
    loss_mask = np.zeros(num_tokens + excess, dtype=np.bool_)
    positions[num_tokens:] = np.arange(excess)
    corrupt: list[int] = []
    begin = 0
    for run in runs:
        here = slice(begin, begin + run.num_tokens)
        positions[here] = np.arange(run.first, run.first + run.num_tokens)
        num_labelled = min(max(run.sequence.num_labels - run.first, 0), run.num_tokens)
        loss_mask[begin : begin + num_labelled] = True
        if reader is not None:
            in_vocabulary = _read(run, num_labelled, reader, tokens[here], labels[here], vocab_size)
            if not in_vocabulary and run.sequence.row not in corrupt:
                corrupt.append(run.sequence.row)
        begin = here.stop
    sequence_ids = tuple(one.row for one in held)
    sequence_index = np.full(num_tokens + excess, -1, dtype=np.int64)
    places = np.arange(len(sequence_ids)).repeat([2 * chunk for chunk in chunks] + wholes)
    lengths = np.array([one.length for one in held], dtype=np.int64)
    is_real = positions[:num_tokens] < lengths[places]
    sequence_index[:num_tokens][is_real] = places[is_real]
    return RankMicroBatch(
        tokens=tokens,
        labels=labels,
        positions=positions,
        loss_mask=loss_mask,
        sequence_index=sequence_index,
        ring=micro_batch.ranks,
        ring_slices=tuple(2 * chunk for chunk in chunks),
        local_lengths=(*wholes, excess) if excess else tuple(wholes),
        sequence_ids=sequence_ids,
        index=m,
        corrupt_ids=tuple(corrupt),
        offload_ratio=micro_batch.offload_ratio,
    )


def padding_micro_batch(rank: int, num_tokens: int = 1) -> RankMicroBatch:
    """Return padding without loss: what a rank runs at a position where the plan gives nothing."""
    return RankMicroBatch(
        tokens=np.zeros(num_tokens, dtype=np.int64),
        labels=np.zeros(num_tokens, dtype=np.int64),
        positions=np.arange(num_tokens),
        loss_mask=np.zeros(num_tokens, dtype=np.bool_),
        sequence_index=np.full(num_tokens, -1, dtype=np.int64),
        ring=(rank,),
        ring_slices=(),
        local_lengths=(num_tokens,),
        sequence_ids=(),
        index=None,
        corrupt_ids=(),
        offload_ratio=0.0,
    )


@dataclass(frozen=True)
class _Sequence:
    """What the table says of one sequence."""

    row: int
    length: int
    num_labels: int
    begin: int


@dataclass(frozen=True)
class _Run:
    """Neighbouring tokens of one sequence: ``num_tokens`` from position ``first``, padded."""

    sequence: _Sequence
    first: int
    num_tokens: int


def _held(
    plan: Plan, sequences: tuple[int, ...], step_sequences: Int64Array, table: Sequences
) -> list[_Sequence]:
    """Look up a plan's sequences in the table, and check that the plan knows their lengths."""
    rows = step_sequences[list(sequences)]
    columns = (rows, table.lengths(rows), table.num_labels(rows), table.begins(rows))
    found = [_Sequence(*one) for one in zip(*(column.tolist() for column in columns), strict=True)]
    for sequence, one in zip(sequences, found, strict=True):
        if plan.lengths[sequence] != one.length:
            raise ValueError(
                f"the plan gives sequence {sequence} {plan.lengths[sequence]:,} tokens, the "
                f"sequence table {one.length:,} (row {one.row}): the plan was made for another step"
            )
    return found


def _read(
    run: _Run,
    num_labelled: int,
    reader: TokenReader,
    tokens: Int64Array,
    labels: Int64Array,
    vocab_size: int,
) -> bool:
    """Fill a run's tokens and labels; return whether all of them are in the vocabulary."""
    num_held = min(max(run.sequence.length - run.first, 0), run.num_tokens)
    if not num_held:
        return True
    # The label of a run's last token is the token after it, which another rank may hold.
    read = reader.read(run.sequence.begin + run.first, max(num_held, num_labelled + 1))
    tokens[:num_held] = read[:num_held]
    labels[:num_labelled] = read[1 : num_labelled + 1]
    return bool(read.min() >= 0 and read.max() < vocab_size)
