"""How the steps of a run are drawn, planned and read on this rank, as its arguments say.

And whether that can work: ranks compare the tokens they read, and a step may be too long to wait.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_hdp.data import DataOrder
from megatron_hdp.data.mixture import BatchSize, Corpus, Mixture
from megatron_hdp.data.steps import PlanSettings, RankStep, Reader, StepTotals, plan_by
from megatron_hdp.megatron.model import model_dtype
from megatron_hdp.megatron.options import (
    TrainingArguments,
    growth_of,
    model_shape,
    padded_vocab_size,
    planned_weights,
    sequences_of,
)
from megatron_hdp.megatron.parallel import RankPlace, compute_device, say
from megatron_hdp.planner import CostModel
from megatron_hdp.planner.experts import exchanged_bytes_per_token
from megatron_hdp.runtime.gathering import share_arrays

_HALF = 2**32
_LONG_SHARE = 0.5  # a rank's host is ahead of its GPU, so its messages wait from before the step


def batch_size_of(arguments: TrainingArguments, split: str = "train") -> BatchSize:
    """The size of a step of a split of the data."""
    if split != "train" and arguments.eval_global_batch_size:
        return BatchSize(arguments.eval_global_batch_size)
    growth = growth_of(arguments) if split == "train" else ()
    return BatchSize(sequences_of(arguments), arguments.hdp_global_batch_tokens, growth)


def least_ranks(settings: PlanSettings, longest: int) -> int:
    """The fewest HDP ranks that a sequence of so many tokens fits on, of those that there are.

    Those that share experts are there together or not at all.
    """
    together = settings.lockstep_ranks
    cost_model = replace(settings.cost_model, rank_speeds=())

    def fits(num_ranks: int) -> bool:
        fewer = replace(settings, num_ranks=num_ranks, cost_model=cost_model)
        try:
            plan_by(fewer, np.array([longest]))
        except ValueError:
            return False
        return True

    sizes = range(together, settings.num_ranks + 1, together)
    return sizes[bisect_left(sizes[:-1], True, key=fits)]


def plan_settings(
    arguments: TrainingArguments,
    place: RankPlace,
    cost_model: CostModel,
    vocab_size: int,
    split: str = "train",
) -> PlanSettings:
    """What decides, beside the data, how steps are drawn and planned: the same on every rank."""
    vocabulary = padded_vocab_size(vocab_size, arguments)
    return PlanSettings(
        batch=batch_size_of(arguments, split),
        seed=arguments.seed,
        num_ranks=place.num_hdp_ranks,
        num_stages=place.num_stages,
        lockstep_ranks=place.lockstep_ranks,
        tokens_per_rank=arguments.hdp_tokens_per_rank,
        strategy=arguments.hdp_strategy,
        max_length=arguments.seq_length,
        slice_multiple=arguments.hdp_slice_multiple,
        offload=arguments.hdp_offload,
        host_memory_bytes=arguments.host_memory_bytes,
        cost_model=cost_model,
        num_model_chunks=place.num_model_chunks,
        stage_weights=planned_weights(arguments, vocabulary) or (),
        sequence_parts=arguments.sequence_parts,
        streams=arguments.streams,
        recompute=arguments.hdp_recompute,
        window=model_shape(arguments, vocabulary).window,
    )


def reader_of(
    place: RankPlace, vocab_size: int, broadcast_at: Collection[str], num_further: int = 0
) -> Reader:
    """What this rank reads of a step.

    Along the axes `broadcast_at` one rank reads for the others. The last stage predicts
    `num_further` tokens behind the label, too.
    """
    is_at_an_end = place.is_first_stage or place.is_last_stage
    return Reader(
        hdp_rank=place.hdp_rank,
        vocab_size=vocab_size,
        reads_tokens=place.reads_tokens if "tensor" in broadcast_at else is_at_an_end,
        reads_mask=is_at_an_end,
        token_multiple=place.token_multiple,
        num_further=num_further if place.is_last_stage else 0,
    )


def share_tokens(step: RankStep, place: RankPlace, broadcast_at: Collection[str]) -> None:
    """Gives the tensor-parallel ranks of the first and last stage what their first one read.

    Along other axes than those of `broadcast_at` each of them has read the same.
    """
    if place.num_tensor_ranks == 1 or not (place.is_first_stage or place.is_last_stage):
        return
    if "tensor" not in broadcast_at:
        return
    arrays = [
        array
        for one in step.micro_batches
        for array in (one.tokens, one.labels, one.further_labels)
    ]
    source = parallel_state.get_tensor_model_parallel_src_rank()
    group = parallel_state.get_tensor_model_parallel_group()
    share_arrays(arrays, source, group, compute_device())


def say_what_ends(mixture: Mixture, totals: StepTotals) -> None:
    """Tells of sources whose last sequence is in a step, so that each is told once."""
    for source in mixture.sources:
        before, after = totals.before.of(source.name).rows, totals.after.of(source.name).rows
        if before == after:
            continue  # nothing was drawn of it; should it have failed, it is not looked at
        if source.stream.has_ended(after) and not source.stream.has_ended(before):
            say(
                f"source '{source.name}' ends with this step, its max-epochs are over: its share "
                "goes to the others"
            )


def all_to_all_bytes(arguments: TrainingArguments, num_tokens: int) -> int | None:
    """Bytes that a step of so many tokens sends to experts of other ranks and back, if any are."""
    if not arguments.num_experts or arguments.expert_model_parallel_size == 1:
        return None
    per_token = exchanged_bytes_per_token(
        values_per_token=model_shape(arguments, vocab_size=0).sent_to_experts,
        value_bytes=model_dtype(arguments).itemsize,
        expert_ranks=arguments.expert_model_parallel_size,
    )
    return round(num_tokens * per_token)


def contents_of(corpus: Corpus, place: RankPlace) -> dict[str, int]:
    """Fingerprints of the tokens that this rank reads, by source, for all ranks to compare.

    A rank that reads none is not asked for its files: it takes the word of the first rank, which
    always reads. Every rank of the job must call this.
    """
    found = [one.contents() if place.reads_tokens else 0 for one in corpus.sources]
    halves = torch.tensor([divmod(one, _HALF) for one in found], device=compute_device())
    dist.broadcast(halves, src=0)
    if not place.reads_tokens:
        found = [high * _HALF + low for high, low in halves.tolist()]
    return dict(zip(corpus.names, found, strict=True))


def data_order(
    arguments: TrainingArguments, corpus: Corpus, contents: Mapping[str, int]
) -> DataOrder:
    """What decides which sequences form a step, and what stands in them.

    `contents` are fingerprints of the sources' tokens, where they are known.
    """
    sources = {
        name: replace(one, contents=contents.get(name)) for name, one in corpus.orders().items()
    }
    return DataOrder(
        hybrid_data_parallel=True,
        seed=arguments.seed,
        seq_length=arguments.seq_length,
        weight_unit=corpus.spec.weight_unit,
        sources=sources,
    )


class LongStepWarning:
    """Warns of steps that take so long that a wait inside of them may be taken for a hang.

    A rank that has nothing to do waits in a ring, or in gradient sync, for most of a step. NCCL
    ends the job once a message has waited for longer than its communicator's timeout.
    """

    def __init__(self, timeout_minutes: int) -> None:
        self._timeout_s = 60.0 * timeout_minutes
        self._has_warned = False

    def check(self, step_s: float, how: str) -> None:
        """Says once that a step "is planned to take" or "took" too long, and what to do."""
        if self._has_warned or step_s <= _LONG_SHARE * self._timeout_s:
            return
        self._has_warned = True
        enough = -(-step_s // (60 * _LONG_SHARE)) + 1
        say(
            f"warning: a step {how} {step_s:,.0f} s, and a rank may have to wait for most of it; "
            f"found --distributed-timeout-minutes {self._timeout_s / 60:.0f}, expected at least "
            f"{enough:.0f}: ranks that wait longer are taken for hung, and the job ends"
        )
