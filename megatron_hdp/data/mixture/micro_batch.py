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
from megatron_hdp.data.mixture.corpus import Corpus
from megatron_hdp.data.mixture.step import Step
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
    """Places in the step's sequences, ring slices first, then whole sequences."""
    sources: tuple[int, ...]
    """Index of the source of each of them."""
    index: int | None
    """The micro-batch's index in the plan; None for padding."""
    corrupt_ids: tuple[int, ...]
    """Those of `sequence_ids` that hold tokens outside the vocabulary here."""
    offload_ratio: float

    def drop(self, sequence_ids: Collection[int]) -> None:
        """Take the tokens, labels and loss of these sequences out, as if they were padding."""
        begin = 0
        lengths = self.ring_slices + self.local_lengths
        for sequence, length in zip(self.sequence_ids, lengths, strict=False):
            if sequence in sequence_ids:
                for array in (self.tokens, self.labels, self.loss_mask):
                    array[begin : begin + length] = 0
                self.sequence_index[begin : begin + length] = -1
            begin += length


def read_micro_batch(
    plan: Plan,
    m: int,
    rank: int,
    step: Step,
    corpus: Corpus,
    *,
    vocab_size: int,
    reads_tokens: bool = True,
    token_multiple: int = 1,
) -> RankMicroBatch:
    """Read this rank's part of micro-batch ``m``, and no other token.

    Args:
        plan: the step's plan; its sequence ids are places in the step.
        m: micro-batch index.
        rank: HDP rank, a member of the micro-batch.
        step: what was drawn.
        corpus: what it was drawn from.
        vocab_size: token ids must be below this.
        reads_tokens: without it tokens and labels stay 0.
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
    sequence_ids = (*sharded, *whole)
    _require_lengths(plan, step, sequence_ids)
    chunks = [chunk_tokens(int(step.lengths[i]), degree, plan.slice_multiple) for i in sharded]
    wholes = [chunk_tokens(int(step.lengths[i]), 1, plan.slice_multiple) for i in whole]

    head = micro_batch.ranks.index(rank)
    tail = 2 * degree - 1 - head
    runs: list[_Run] = []
    for i, chunk in zip(sharded, chunks, strict=True):
        runs += [_Run(i, head * chunk, chunk), _Run(i, tail * chunk, chunk)]
    runs += [_Run(i, 0, size) for i, size in zip(whole, wholes, strict=True)]

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
        num_labelled = min(max(int(step.num_labels[run.i]) - run.first, 0), run.num_tokens)
        loss_mask[begin : begin + num_labelled] = corpus.is_trained(
            step, run.i, run.first, run.first + num_labelled
        )
        if reads_tokens:
            in_vocabulary = _read(
                run, num_labelled, step, corpus, tokens[here], labels[here], vocab_size
            )
            if not in_vocabulary and run.i not in corrupt:
                corrupt.append(run.i)
        begin = here.stop
    sequence_index = np.full(num_tokens + excess, -1, dtype=np.int64)
    places = np.arange(len(sequence_ids)).repeat([2 * chunk for chunk in chunks] + wholes)
    is_real = positions[:num_tokens] < step.lengths[list(sequence_ids)][places]
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
        sources=tuple(int(step.sources[i]) for i in sequence_ids),
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
        sources=(),
        index=None,
        corrupt_ids=(),
        offload_ratio=0.0,
    )


@dataclass(frozen=True)
class _Run:
    """Neighbouring tokens of sequence ``i``: ``num_tokens`` from position ``first``, padded."""

    i: int
    first: int
    num_tokens: int


def _require_lengths(plan: Plan, step: Step, sequences: Collection[int]) -> None:
    """Check that the plan knows the sequences' lengths."""
    for i in sequences:
        if plan.lengths[i] != step.lengths[i]:
            raise ValueError(
                f"the plan gives sequence {i} {plan.lengths[i]:,} tokens, the step "
                f"{step.lengths[i]:,}: the plan was made for another step"
            )


def _read(
    run: _Run,
    num_labelled: int,
    step: Step,
    corpus: Corpus,
    tokens: Int64Array,
    labels: Int64Array,
    vocab_size: int,
) -> bool:
    """Fill a run's tokens and labels; return whether all of them are in the vocabulary."""
    num_held = min(max(int(step.lengths[run.i]) - run.first, 0), run.num_tokens)
    if not num_held:
        return True
    # The label of a run's last token is the token after it, which another rank may hold.
    read = corpus.tokens(step, run.i, run.first, max(num_held, num_labelled + 1))
    tokens[:num_held] = read[:num_held]
    labels[:num_labelled] = read[1 : num_labelled + 1]
    return bool(read.min() >= 0 and read.max() < vocab_size)
