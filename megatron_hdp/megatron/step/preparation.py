"""How the steps of a run are drawn, planned and read on this rank, as its arguments say."""

from __future__ import annotations

from collections.abc import Collection

from megatron_hdp.data.mixture import BatchSize
from megatron_hdp.data.steps import PlanSettings, Reader
from megatron_hdp.megatron.model import model_dtype, padded_vocab_size
from megatron_hdp.megatron.options import (
    TrainingArguments,
    growth_of,
    model_shape,
    planned_weights,
    sequences_of,
)
from megatron_hdp.megatron.parallel import RankPlace
from megatron_hdp.planner import CostModel
from megatron_hdp.planner.experts import exchanged_bytes_per_token


def batch_size_of(arguments: TrainingArguments, split: str = "train") -> BatchSize:
    """The size of a step of a split of the data."""
    if split != "train" and arguments.eval_global_batch_size:
        return BatchSize(arguments.eval_global_batch_size)
    growth = growth_of(arguments) if split == "train" else ()
    return BatchSize(sequences_of(arguments), arguments.hdp_global_batch_tokens, growth)


def plan_settings(
    arguments: TrainingArguments,
    place: RankPlace,
    cost_model: CostModel,
    vocab_size: int,
    split: str = "train",
) -> PlanSettings:
    """What decides, beside the data, how steps are drawn and planned: the same on every rank.

    Args:
        arguments: of the run.
        place: of this rank.
        cost_model: that the run begins with.
        vocab_size: entries of the tokenizer.
        split: of the data.
    """
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
        cost_model=cost_model,
        num_model_chunks=place.num_model_chunks,
        stage_weights=planned_weights(arguments, vocabulary) or (),
        window=model_shape(arguments, vocabulary).window,
    )


def reader_of(
    place: RankPlace, vocab_size: int, broadcast_at: Collection[str], num_further: int = 0
) -> Reader:
    """What this rank reads of a step.

    Args:
        place: of the rank.
        vocab_size: entries of the tokenizer.
        broadcast_at: axes along which one rank reads for the others.
        num_further: tokens behind the label that the last stage predicts, too.
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
