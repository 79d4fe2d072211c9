"""Valid plans that no strategy would make: any degree, ring order and mixture in a micro-batch."""

from dataclasses import replace

import numpy as np

from megatron_hdp.planner import Plan, slice_tokens
from megatron_hdp.planner.validation import tokens_per_member


def random_plan(
    lengths, *, ranks, tokens_per_rank, slice_multiple=1, seed=0, offload=False, most_parts=1
):
    """Rings of random size, several sequences to a ring, whole ones beside, in random order.

    With `offload` every micro-batch has a ratio of its own; some have none. Each runs in up to
    `most_parts` parts, cut anywhere.
    """
    rng = np.random.default_rng(seed)
    micro_batches = []
    for sequence in rng.permutation(len(lengths)).tolist():
        length = int(lengths[sequence])
        degrees = [
            degree
            for degree in range(1, ranks + 1)
            if slice_tokens(length, degree, slice_multiple) <= tokens_per_rank
        ]
        degree = int(rng.choice(degrees))
        held = slice_tokens(length, degree, slice_multiple)
        sizes = (held, slice_tokens(length, 1, slice_multiple))
        if not _join(micro_batches, sequence, degree, sizes, tokens_per_rank, rng):
            ring = rng.permutation(ranks)[:degree].tolist()
            micro_batches.append(
                {
                    "ring": ring,
                    "sharded": [sequence],
                    "local": [],
                    "load": dict.fromkeys(ring, held),
                }
            )
    rng.shuffle(micro_batches)
    ratios = rng.choice([0.0, 0.2, 0.5, 1.0], len(micro_batches)) * offload
    made = _plan(micro_batches, lengths, ranks, tokens_per_rank, slice_multiple, ratios)
    rng = np.random.default_rng(seed)  # so that parts change nothing else
    num_parts = rng.integers(1, most_parts, made.num_micro_batches, endpoint=True)
    return replace(made, num_parts=num_parts, linear_tokens=float(seed))


def in_streams(plan, *, tokens_per_rank, seed):
    """The plan under a smaller capacity: what exceeds it streams, and some of what does not."""
    rng, every = np.random.default_rng(seed), np.ones(plan.num_micro_batches, dtype=bool)
    run = slice(0, plan.num_micro_batches)

    def fullest(num_parts):
        made = replace(plan, num_parts=num_parts, streams=every)
        return np.maximum.reduceat(tokens_per_member(made, run)[0], plan.rank_offsets[:-1])

    num_parts = np.ones_like(plan.rank_offsets[:-1])
    while (is_over := fullest(num_parts) > tokens_per_rank).any():
        num_parts += is_over
    streams = (num_parts > 1) | (rng.random(len(num_parts)) < 0.3)
    num_parts += rng.integers(1, 3, len(num_parts))
    num_parts = np.where(streams, num_parts, plan.parts_of_each)
    some, all_or_none = (
        rng.integers(0, num_parts + 1),
        rng.choice([0, 1], len(num_parts)) * num_parts,
    )
    host_parts = np.where(rng.random(len(num_parts)) < 0.5, some, all_or_none)
    ratios = host_parts / num_parts * streams
    made = replace(
        plan,
        tokens_per_rank=tokens_per_rank,
        num_parts=num_parts,
        streams=streams,
        offload_ratios=ratios,
    )
    made.validate(num_layers=1)
    return made


def _join(micro_batches, sequence, degree, sizes, capacity, rng):
    """Try to add the sequence to a micro-batch that is there: sharded over its ring, or local."""
    held, whole = sizes
    for i in rng.permutation(len(micro_batches)).tolist():
        micro_batch = micro_batches[i]
        load = micro_batch["load"]
        if len(load) == degree and rng.random() < 0.5 and max(load.values()) + held <= capacity:
            micro_batch["sharded"].append(sequence)
            for rank in load:
                load[rank] += held
            return True
        roomy = [rank for rank in load if load[rank] + whole <= capacity]
        if len(load) > 1 and roomy and rng.random() < 0.5:
            rank = int(rng.choice(roomy))
            micro_batch["local"].append((rank, sequence))
            load[rank] += whole
            return True
    return False


def _plan(micro_batches, lengths, ranks, capacity, multiple, ratios):
    def offsets(counts):
        return np.concatenate([[0], np.cumsum(list(counts))]).astype(np.int64)

    local = [sorted(micro_batch["local"]) for micro_batch in micro_batches]
    made = Plan(
        num_ranks=ranks,
        tokens_per_rank=capacity,
        strategy="random",
        lengths=np.asarray(lengths),
        rank_offsets=offsets(len(m["ring"]) for m in micro_batches),
        ranks=[rank for m in micro_batches for rank in m["ring"]],
        sequence_offsets=offsets(len(m["sharded"]) for m in micro_batches),
        sequences=[sequence for m in micro_batches for sequence in m["sharded"]],
        local_offsets=offsets(map(len, local)),
        local_sequences=[sequence for pairs in local for _, sequence in pairs],
        local_ranks=[rank for pairs in local for rank, _ in pairs],
        offload_ratios=ratios,
        slice_multiple=multiple,
        summary={"makespan_s": 0.0, "efficiency": 1.0, "planning_ms": 0.0},
    )
    made.validate(num_layers=1)  # the tokens fit as they are, whatever goes to the host
    return made
