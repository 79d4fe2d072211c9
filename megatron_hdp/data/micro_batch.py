"""What one rank holds of one micro-batch: its slices' tokens, labels, positions and loss mask.

A sequence of a ring of degree ``D`` is cut into ``2 D`` chunks; ring member ``i`` holds chunks
``i`` and ``2 D - 1 - i`` (head and tail), so that every member has the same causal area. Only the
tokens of those chunks, and one label token after each, are read.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hdp.data.index_file import Int64Array
from megatron_hdp.data.sequences import SequenceTable
from megatron_hdp.data.token_file import TokenFile
from megatron_hdp.planner import Plan, chunk_tokens


@dataclass(frozen=True)
class RankMicroBatch:
    """One rank's part of one micro-batch; ring slices first, then whole sequences.

    Padding stands at the end of its sequence: token 0, label 0, no loss, positions counting on.
    """

    tokens: Int64Array
    labels: Int64Array
    positions: Int64Array
    """Each token's position in its own sequence."""
    loss_mask: npt.NDArray[np.bool_]
    sequence_index: Int64Array
    """Place of each token's sequence among the ring slices and whole sequences; -1 for padding."""
    ring: tuple[int, ...]
    """HDP ranks in ring order; this rank alone at degree 1."""
    ring_slices: tuple[int, ...]
    """Padded tokens of each ring sequence's slice here: head chunk, tail chunk, of equal size."""
    local_lengths: tuple[int, ...]
    """Padded tokens of each whole sequence here."""
    num_loss_tokens: int
    sequence_ids: tuple[int, ...]
    """Rows of the sequence table, ring slices first, then whole sequences."""
    offload_ratio: float


def read_micro_batch(
    plan: Plan,
    m: int,
    rank: int,
    step_sequences: Int64Array,
    table: SequenceTable,
    token_file: TokenFile,
) -> RankMicroBatch:
    """Read this rank's part of micro-batch ``m``, and nothing else, from the token file.

    Args:
        plan: the step's plan; its sequence ids are indices into ``step_sequences``.
        m: micro-batch index.
        rank: HDP rank, a member of the micro-batch.
        step_sequences: rows of ``table``, as drawn by the sampler.
        table: the sequences.
        token_file: their tokens.

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
    ring_rows = [_row(plan, sequence, step_sequences, table) for sequence in sharded]
    whole_rows = [_row(plan, sequence, step_sequences, table) for sequence in whole]
    chunks = [chunk_tokens(int(table.length[r]), degree, plan.slice_multiple) for r in ring_rows]
    wholes = [chunk_tokens(int(table.length[r]), 1, plan.slice_multiple) for r in whole_rows]

    head = micro_batch.ranks.index(rank)
    tail = 2 * degree - 1 - head
    runs: list[tuple[int, int, int]] = []  # (row, first position, tokens)
    for row, chunk in zip(ring_rows, chunks, strict=True):
        runs += [(row, head * chunk, chunk), (row, tail * chunk, chunk)]
    runs += [(row, 0, size) for row, size in zip(whole_rows, wholes, strict=True)]

    tokens, labels, positions, loss_mask = _read_runs(runs, table, token_file)
    padded = [2 * chunk for chunk in chunks] + wholes
    sequence_index = np.arange(len(padded)).repeat(padded)
    lengths = table.length[[*ring_rows, *whole_rows]]
    sequence_index[positions >= lengths[sequence_index]] = -1
    return RankMicroBatch(
        tokens=tokens,
        labels=labels,
        positions=positions,
        loss_mask=loss_mask,
        sequence_index=sequence_index,
        ring=micro_batch.ranks,
        ring_slices=tuple(2 * chunk for chunk in chunks),
        local_lengths=tuple(wholes),
        num_loss_tokens=int(np.count_nonzero(loss_mask)),
        sequence_ids=(*ring_rows, *whole_rows),
        offload_ratio=micro_batch.offload_ratio,
    )


def padding_micro_batch(rank: int) -> RankMicroBatch:
    """Return one padding token without loss: what a rank runs when the plan gives it nothing."""
    return RankMicroBatch(
        tokens=np.zeros(1, dtype=np.int64),
        labels=np.zeros(1, dtype=np.int64),
        positions=np.zeros(1, dtype=np.int64),
        loss_mask=np.zeros(1, dtype=np.bool_),
        sequence_index=np.full(1, -1, dtype=np.int64),
        ring=(rank,),
        ring_slices=(),
        local_lengths=(1,),
        num_loss_tokens=0,
        sequence_ids=(),
        offload_ratio=0.0,
    )


def _row(plan: Plan, sequence: int, step_sequences: Int64Array, table: SequenceTable) -> int:
    """Return the table row of a plan's sequence, after checking that the plan knows its length."""
    row = int(step_sequences[sequence])
    if plan.lengths[sequence] != table.length[row]:
        raise ValueError(
            f"the plan gives sequence {sequence} {plan.lengths[sequence]:,} tokens, the sequence "
            f"table {table.length[row]:,} (row {row}): the plan was made for another step"
        )
    return row


def _read_runs(
    runs: list[tuple[int, int, int]], table: SequenceTable, token_file: TokenFile
) -> tuple[Int64Array, Int64Array, Int64Array, npt.NDArray[np.bool_]]:
    """Fill tokens, labels, positions and loss mask from (row, first position, tokens) runs."""
    total = sum(num_tokens for _, _, num_tokens in runs)
    tokens, labels, positions = np.zeros((3, total), dtype=np.int64)
    loss_mask = np.zeros(total, dtype=np.bool_)
    offset = 0
    for row, first, num_tokens in runs:
        length, num_labels = int(table.length[row]), int(table.num_labels[row])
        num_held = min(max(length - first, 0), num_tokens)
        num_labelled = min(max(num_labels - first, 0), num_tokens)
        if num_held:
            # The label of a run's last token is the token after it, which another rank may hold.
            num_read = max(num_held, num_labelled + 1)
            begin = int(table.start[row]) + first
            read = token_file.read(int(table.document[row]), begin, begin + num_read)
            tokens[offset : offset + num_held] = read[:num_held]
            labels[offset : offset + num_labelled] = read[1 : num_labelled + 1]
            loss_mask[offset : offset + num_labelled] = True
        positions[offset : offset + num_tokens] = np.arange(first, first + num_tokens)
        offset += num_tokens
    return tokens, labels, positions, loss_mask
