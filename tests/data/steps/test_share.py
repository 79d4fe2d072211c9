"""Shares of the ranks: together the whole step, each of them alone what its rank reads."""

import time
from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.data.mixture import Position, Step
from megatron_hdp.data.steps import (
    PackedShares,
    Reader,
    StepShares,
    pieces_of,
    read_micro_batch,
    work_of,
)
from megatron_hdp.planner import LLAMA_7B, CostModel, plan
from megatron_hdp.planner.lockstep import PADDING, slots
from tests.support import machine
from tests.support.random_plans import random_plan
from tests.support.rank_steps import rank_steps

examples = settings(max_examples=80)
COLUMNS = ("sources", "rows", "starts", "lengths", "num_labels", "num_loss_tokens")


class Recording:
    """A source that remembers what it was asked for."""

    def __init__(self):
        self.tokens_asked, self.trained_asked = [], []

    def tokens(self, source, row, start, count):
        self.tokens_asked.append((source, row, start, count))
        return np.zeros(count, dtype=np.int64)

    def is_trained(self, source, row, start, stop):
        self.trained_asked.append((source, row, start, stop - start))
        return np.ones(stop - start, dtype=bool)


def step_of(lengths, seed=0):
    """Sequences of three sources; some end where their row does, and have a label less."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths, dtype=np.int64)
    num_labels = lengths - rng.integers(0, 2, len(lengths))
    return Step(
        sources=rng.integers(0, 3, len(lengths)),
        rows=rng.permutation(len(lengths)),
        starts=rng.integers(0, 50, len(lengths)),
        lengths=lengths,
        num_labels=num_labels,
        num_loss_tokens=num_labels // 2,
        before=Position(),
        after=Position(),
        max_length=100,
        weights=(0.3, 0.3, 0.4),
    )


@st.composite
def cut_steps(draw):
    """A step, what cuts it, and its number of ranks."""
    ranks, seed = draw(st.integers(1, 6)), draw(st.integers(0, 999))
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=14))
    multiple = draw(st.sampled_from([1, 4]))
    made = random_plan(
        lengths, ranks=ranks, tokens_per_rank=128, slice_multiple=multiple, seed=seed, offload=True
    )
    step = step_of(lengths, seed)
    is_aligned = draw(st.booleans())
    return step, made, StepShares(step, made, is_aligned=is_aligned), is_aligned


@examples
@given(cut_steps())
def test_pieces_are_exactly_what_reading_asks_for(found):
    step, made, shares, _ = found
    for share in shares.of(range(made.num_ranks)):
        source = Recording()
        for slot in range(share.num_slots):
            read_micro_batch(share, slot, Reader(share.hdp_rank, 10), source)
        pieces = pieces_of(share)
        columns = (pieces.sources, pieces.rows, pieces.starts)
        asked = zip(*(one.tolist() for one in (*columns, pieces.counts)), strict=True)
        labelled = zip(*(one.tolist() for one in (*columns, pieces.num_labelled)), strict=True)
        assert list(asked) == source.tokens_asked
        assert [one for one in labelled if one[-1]] == source.trained_asked
        assert all(getattr(pieces, one.name).dtype == np.int64 for one in fields(pieces))


@examples
@given(cut_steps(), st.randoms())
def test_shares_cut_alone_equal_those_cut_together(found, random):
    _, made, shares, _ = found
    ranks = list(range(made.num_ranks))
    random.shuffle(ranks)
    together = shares.of(ranks)
    assert [share.hdp_rank for share in together] == ranks
    for rank, share in zip(ranks, together, strict=True):
        (alone,) = shares.of([rank])
        for one in fields(share):
            mine, its = getattr(alone, one.name), getattr(share, one.name)
            assert np.array_equal(mine, its), one.name
            if isinstance(mine, np.ndarray):
                assert mine.dtype == its.dtype
    assert shares.of([]) == []


@examples
@given(cut_steps())
def test_all_shares_cover_the_step(found):
    step, made, shares, is_aligned = found
    held = Counter()
    for share in shares.of(range(made.num_ranks)):
        assert np.array_equal(share.indices, slots(made, aligned=is_aligned)[share.hdp_rank])
        for name in COLUMNS:
            assert np.array_equal(getattr(share, name), getattr(step, name)[share.ids])
        for slot in range(share.num_slots):
            ring, index = share.ring_of(slot), int(share.indices[slot])
            ids = share.ids[share.offsets[slot] : share.offsets[slot + 1]].tolist()
            if index == PADDING:
                assert (ring, ids) == ((share.hdp_rank,), [])
                assert share.offload_ratios[slot] == 0
                continue
            assert ring == made.micro_batch(index).ranks
            assert share.offload_ratios[slot] == made.offload_ratios[index]
            for number, sequence in enumerate(ids):
                is_sharded = number < share.num_sharded[slot]
                held[sequence] += 1 / len(ring) if is_sharded else 1
    assert sorted(held) == list(range(len(step)))
    assert list(held.values()) == pytest.approx([1.0] * len(step))


def test_a_sequence_is_found_in_its_share():
    step = step_of([30, 7, 7])
    made = random_plan(step.lengths, ranks=2, tokens_per_rank=128, seed=1)
    for share in StepShares(step, made).of(range(2)):
        for place, sequence in enumerate(share.ids.tolist()):
            assert share.ids[share.place_of(sequence)] == sequence
            assert share.place_of(sequence) <= place


def test_a_plan_of_another_step_is_refused():
    made = random_plan([30, 8], ranks=2, tokens_per_rank=128)
    with pytest.raises(ValueError, match="found a plan for 2 sequences of 38 tokens, expected"):
        StepShares(step_of([30, 7]), made)


@pytest.mark.slow
def test_the_shares_of_thousands_of_ranks_are_cut_in_little_time():
    """4,096 ranks and 60,000 sequences; generous for a machine with other work."""
    num_ranks = 4096
    lengths = np.minimum(np.random.default_rng(0).lognormal(7, 1, 60_000), 65_536).astype(np.int64)
    step = step_of(np.maximum(lengths, 1))
    made = plan(
        step.lengths,
        ranks=num_ranks,
        tokens_per_rank=65_536,
        cost_model=CostModel(a=1e-12, b=1e-7, kv_bytes_per_token=1000),
    )
    began = time.perf_counter()
    shares = StepShares(step, made)
    found = [one for node in range(512) for one in shares.of(range(8 * node, 8 * node + 8))]
    took_s = time.perf_counter() - began
    print(f"shares of 512 nodes of 8 ranks: {took_s:.2f} s")
    assert len(found) == num_ranks
    assert sum(len(one.ids) for one in found) >= len(step)
    assert took_s < 20


BASE = replace(LLAMA_7B, block_s=1e-4, b_experts=1e-6, attention_b=1e-7, g=0.3)


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
@pytest.mark.parametrize("seed", range(4))
def test_a_share_has_its_part_of_the_plan(ranks, seed):
    lengths = np.random.default_rng(seed).integers(1, 8192 * min(ranks, 4), 60)
    most_parts = 5 if seed % 2 else 1
    made = random_plan(lengths, ranks=ranks, tokens_per_rank=8192, seed=seed, most_parts=most_parts)
    shares = StepShares(step_of(lengths), made).of(range(ranks))
    found = np.array([work_of(share, BASE) for share in shares])
    assert found == pytest.approx(machine.work_of(made, BASE), rel=1e-9)
    assert ranks == 1 or len(made.local_sequences) > 0


def shares_of(ranks=3):
    return [one.share for one in rank_steps([5, 90, 300, 17, 1, 64], ranks=ranks)]


def require_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        for item in fields(other):
            here, there = getattr(one, item.name), getattr(other, item.name)
            if isinstance(there, np.ndarray):
                assert here.dtype == there.dtype and here.tobytes() == there.tobytes(), item.name
            else:
                assert here == there, item.name


@pytest.mark.parametrize("ranks", [3, 8])
def test_shares_that_were_packed_come_out_the_same(ranks):
    shares = shares_of(ranks)
    require_same(PackedShares.of(shares).unpack(), shares)


def test_no_share_at_all_is_packed():
    assert PackedShares.of([]).unpack() == []


@pytest.mark.parametrize("number", [-1, 255, 256, 2**31 - 1, 2**31, -(2**31) - 1, 2**63 - 1])
def test_numbers_of_any_size_are_packed(number):
    shares = [replace(one, rows=one.rows * 0 + number) for one in shares_of()]
    require_same(PackedShares.of(shares).unpack(), shares)


def test_packed_small_numbers_take_few_bytes():
    shares = shares_of()
    packed = PackedShares.of(shares)
    num_bytes = len(packed.sizes) + sum(len(contents) for _, contents in packed.columns)
    values = [value for one in shares for value in vars(one).values()]
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    assert num_bytes < sum(one.nbytes for one in arrays) / 2
