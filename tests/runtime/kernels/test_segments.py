"""Lengths of segments, and how many plans a library makes for those of a run."""

import math

import numpy as np
import torch

from megatron_hdp.planner import LLAMA_7B, chunk_tokens, plan
from megatron_hdp.runtime.kernels.segments import Segments, bucket

CPU = torch.device("cpu")
TOKENS_PER_RANK, SLICE_MULTIPLE = 8192, 8


def test_offsets_are_where_segments_begin_and_end():
    segments = Segments.of((3, 1, 5), CPU)
    assert segments.offsets.tolist() == [0, 3, 4, 9]
    assert segments.offsets.dtype == torch.int32
    assert segments.longest == 5
    assert Segments.of((), CPU).offsets.tolist() == [0]


def test_empty_segments_follow_in_the_same_tensor():
    segments = Segments.of((3, 1, 5), CPU)
    assert segments.bucketed_offsets.tolist() == [0, 3, 4, 9, 9, 9, 9, 9, 9]
    assert segments.bucketed_offsets.data_ptr() == segments.offsets.data_ptr()
    assert Segments.of((7,), CPU).bucketed_offsets.tolist() == [0, 7]
    assert Segments.of((), CPU).bucketed_offsets.tolist() == [0]


def test_buckets():
    assert [bucket(n) for n in (0, 1, 2, 8, 9, 16, 17, 300, 512)] == [
        *(0, 1, 8, 8, 16, 16, 32, 512, 512)
    ]


def tokens_in_plan(num_tokens):
    """What TransformerEngine builds a cuDNN plan for instead of the number of tokens."""
    if num_tokens > 32768:
        return -(-num_tokens // 32768) * 32768
    return max(1024, 1 << math.ceil(math.log2(num_tokens)))


def forward_plans(made, count):
    """What tells cuDNN's forward plans of TransformerEngine apart in one step's calls.

    From cuDNN 9.24 on: the mask, the number of sequences as it is, and rounded tokens of queries
    and of keys, which stand for the longest length as well. What is the same in a whole run (heads,
    head dimension, scale, data type) is left out. A ring calls it with all keys, and with half of
    the queries or of the keys.
    """
    found = set()
    for m in range(made.num_micro_batches):
        one = made.micro_batch(m)
        degree, wholes = len(one.ranks), dict(one.local)
        if degree == 1:
            wholes[one.ranks[0]] = (*wholes.get(one.ranks[0], ()), *one.sequences)
        elif one.sequences:
            held = 2 * padded_tokens(made, one.sequences, degree)
            number, whole, half = count(len(one.sequences)), *map(tokens_in_plan, (held, held // 2))
            found |= {
                ("causal", number, whole, whole),
                ("all", number, whole, half),
                ("all", number, half, whole),
            }
        for sequences in filter(None, wholes.values()):
            tokens = tokens_in_plan(padded_tokens(made, sequences, 1))
            found.add(("causal", count(len(sequences)), tokens, tokens))
    return found


def padded_tokens(made, sequences, degree):
    """Tokens of a chunk of each of them."""
    return sum(chunk_tokens(int(made.lengths[i]), degree, SLICE_MULTIPLE) for i in sequences)


def random_plans(number):
    """Plans of a long-tailed lot of lengths for 8 to 64 ranks; packs of 1 to several hundred."""
    random = np.random.default_rng(0)
    for _ in range(number):
        ranks, mean = int(random.choice([8, 16, 32, 64])), np.exp(random.uniform(2.5, 9))
        longest = min(ranks * TOKENS_PER_RANK // 2, 2**17)
        size = int(random.uniform(0.2, 3) * ranks * TOKENS_PER_RANK / mean / 3)
        drawn = random.lognormal(np.log(mean), random.uniform(0.5, 2), min(max(size, 1), 20_000))
        yield plan(
            drawn.clip(1, longest).astype(int).tolist(),
            ranks=ranks,
            tokens_per_rank=TOKENS_PER_RANK,
            slice_multiple=SLICE_MULTIPLE,
            cost_model=LLAMA_7B,
        )


def test_few_plans_are_built_in_a_run():
    """Planted: the number of sequences as it is."""
    found, planted = set(), set()
    for made in random_plans(1000):
        found |= forward_plans(made, bucket)
        planted |= forward_plans(made, int)
    assert max(number for _, number, _, _ in planted) > 300
    assert len({key[:2] for key in found}) <= 12
    assert len(found) <= 40
    assert len({key[:2] for key in planted}) > 200 and len(planted) > 500
