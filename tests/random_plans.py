"""Valid plans that no strategy would make: any degree, ring order and mixture in a micro-batch."""

import numpy as np

from megatron_hdp.planner import Plan, slice_tokens


def random_plan(lengths, *, ranks, tokens_per_rank, slice_multiple=1, seed=0):
    """Rings of random size, several sequences to a ring, whole ones beside, in random order."""
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
    return _plan(micro_batches, lengths, ranks, tokens_per_rank, slice_multiple)


def lockstep_plan(lengths, *, ranks, tokens_per_rank, slice_multiple=1, seed=0):
    """Rings of random size and order, all ranks in one of them at every position."""
    rng = np.random.default_rng(seed)
    waiting = rng.permutation(len(lengths)).tolist()
    micro_batches = []
    while waiting:
        taken, rings = _slot(waiting, lengths, ranks, tokens_per_rank, slice_multiple, rng)
        waiting = waiting[len(taken) :]
        for sequence, ring in zip(taken, rings, strict=True):
            held = slice_tokens(int(lengths[sequence]), len(ring), slice_multiple)
            micro_batches.append(
                {
                    "ring": ring,
                    "sharded": [sequence],
                    "local": [],
                    "load": dict.fromkeys(ring, held),
                }
            )
        whole = [slice_tokens(int(lengths[s]), 1, slice_multiple) for s in waiting[:1]]
        for micro_batch in micro_batches[-len(rings) :]:
            rank, load = micro_batch["ring"][-1], micro_batch["load"]
            if len(load) > 1 and whole and load[rank] + whole[0] <= tokens_per_rank:
                micro_batch["local"].append((rank, waiting.pop(0)))
                break
    return _plan(micro_batches, lengths, ranks, tokens_per_rank, slice_multiple)


def _slot(waiting, lengths, ranks, capacity, multiple, rng):
    """The next sequences and a ring for each; together the rings take every rank."""
    for count in range(int(rng.integers(1, min(ranks, len(waiting)) + 1)), 0, -1):
        cuts = np.sort(rng.choice(np.arange(1, ranks), count - 1, replace=False))
        rings = [ring.tolist() for ring in np.split(rng.permutation(ranks), cuts)]
        taken = waiting[:count]
        needs = [
            slice_tokens(int(lengths[sequence]), len(ring), multiple)
            for sequence, ring in zip(taken, rings, strict=True)
        ]
        if max(needs) <= capacity:
            return taken, rings
    raise ValueError(f"a sequence of {lengths[waiting[0]]} tokens does not fit on {ranks} ranks")


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


def _plan(micro_batches, lengths, ranks, capacity, multiple):
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
        offload_ratios=np.zeros(len(micro_batches)),
        slice_multiple=multiple,
        summary={"efficiency": 1.0, "planning_ms": 0.0},
    )
    made.validate()
    return made
