"""Items in the gaps of pipelines: where these are, and what a step takes longer at most."""

import random
from dataclasses import replace

import numpy as np
import pytest

from megatron_hdp.media import (
    ItemBatch,
    ItemCostModel,
    evaluate_items,
    gaps_of,
    plan_in_gaps,
    plan_items,
    slots_of_micro_batches,
    wave_choices,
    with_items_apart,
)
from megatron_hdp.planner import CostModel, evaluate, plan
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.simulator.joined import joined_step
from tests.media.test_items import COST, web_mix
from tests.planner.experts.test_evaluation import plan_of

COSTS = CostModel(a=1e-12, b=1e-6, g=0.0, kv_bytes_per_token=0.0)
ONE = np.zeros(1, dtype=np.int64)


def choice(made, times, slots, starts, tensor_ranks):
    """Waves of items in these slots, and the gaps of the schedule for them."""
    waves = np.searchsorted(starts, slots, side="right") - 1
    return waves.astype(np.int32), gaps_of(made, times, starts, tensor_ranks=tensor_ranks)


def drawn(seed, *, ranks, stages, chunks=1, parts=1, micro_batches=8, tensor_ranks=1, even=False):
    """A plan, its times, and a web mix of pictures dealt to its micro-batches by chance."""
    rng, capacity = np.random.default_rng(seed), 4096
    lengths = [capacity] * (ranks * micro_batches)
    if not even:
        lengths = [
            int(one) for one in np.clip(rng.lognormal(7, 1.3, 4 * len(lengths)), 64, 7 * capacity)
        ]
        lengths = [min(one, ranks * capacity) for one in lengths]
    costs = COSTS if even else replace(COSTS, g=1e-4)
    made = plan(
        lengths,
        ranks=ranks,
        tokens_per_rank=capacity,
        cost_model=costs,
        pipeline_stages=stages,
        virtual_stages=chunks,
        sequence_parts=parts,
    )
    times = evaluate(made, costs, stages, chunks)
    slots = slots_of_micro_batches(made, times.pipeline)
    patches = np.array(web_mix(4 * made.num_micro_batches if even else 200, seed))
    patches = np.minimum(patches, capacity)
    owners = rng.integers(0, made.num_micro_batches, len(patches))
    batch = ItemBatch(
        patches=patches,
        consumers=made.ranks[made.rank_offsets[owners]] * np.int32(tensor_ranks),
        micro_batches=slots[owners].astype(np.int32),
        num_ranks=ranks * stages * tensor_ranks,
        patches_per_pack=40_000,
    )
    return made, times, batch


def scaled(batch, gpu_seconds, is_trained=True):
    """A cost model with which all items take so long on one rank."""
    work = ((COST.patch_s + COST.patch2_s * batch.patches) * batch.patches).sum()
    by = gpu_seconds / work
    return replace(
        COST,
        patch_s=COST.patch_s * by,
        patch2_s=COST.patch2_s * by,
        pack_s=0.0,
        gathered_s_per_patch=COST.gathered_s_per_patch * by,
        forward_share=0.25 if is_trained else 1.0,
    )


def test_gaps_by_hand():
    """Two stages, two micro-batches of 6 s: 1 s forward and 2 s backward on each."""
    made = plan_of([[0], [0]], [6, 6], ranks=1)
    times = evaluate(made, CostModel(a=0.0, b=1.0, g=0.0, kv_bytes_per_token=0.0), 2)
    gaps = gaps_of(made, times, np.array([0, 1]), tensor_ranks=2)
    assert gaps.makespan_s == pytest.approx(9)
    assert gaps.free_until_s == pytest.approx([0, 0, 1, 1])
    assert gaps.free_from_s == pytest.approx([9, 9, 7, 7])
    assert gaps.wanted_s == pytest.approx([0, 1])
    assert gaps.given_s == pytest.approx([6, 9])
    # an item of the first slot, one of the second: 4 s each, of which 1 s forward
    cost = ItemCostModel(patch_s=1.0)
    batch = ItemBatch(
        patches=np.array([4, 4]),
        consumers=np.zeros(2, dtype=np.int32),
        micro_batches=np.array([0, 1], dtype=np.int32),
        num_ranks=4,
        ranks_per_node=1,
        waves=np.array([0, 1], dtype=np.int32),
        gaps=gaps,
    )
    made_items = plan_items(batch, cost)
    late_s = evaluate_items(batch, made_items, cost).makespan_s
    # rows of the first are late by 1 s; then the second's are in time, its gradients take 3 s more
    assert late_s == pytest.approx(4)
    step_s = joined_step(made, times, batch, made_items, cost, tensor_ranks=2).step_s
    assert step_s == pytest.approx(13)
    alone = replace(
        batch, waves=np.zeros(2, dtype=np.int32), gaps=gaps_of(made, times, ONE, tensor_ranks=2)
    )
    assert evaluate_items(alone, made_items, cost).bound_s <= 4


@pytest.mark.parametrize("strategy", ["step", "home"])
def test_no_step_takes_longer_than_is_said(strategy, seeds):
    for seed in seeds[::16]:
        chosen = random.Random(seed)
        stages, tensor_ranks = chosen.choice([2, 3, 4]), chosen.choice([1, 2])
        chunks, parts = chosen.choice([(1, 1), (2, 1), (1, 4)])
        made, times, batch = drawn(
            seed,
            ranks=chosen.choice([1, 2, 4]),
            stages=stages,
            chunks=chunks,
            parts=parts,
            micro_batches=chosen.choice([2, 6]),
            tensor_ranks=tensor_ranks,
        )
        share = chosen.choice([0.01, 0.1, 0.5])
        gpu_seconds = share * times.makespan_s * batch.num_ranks
        cost = scaled(batch, gpu_seconds, chosen.random() < 0.7)
        num_slots = int(batch.micro_batches.max()) + 1
        slots = batch.micro_batches
        choices = [choice(made, times, slots, one, tensor_ranks) for one in wave_choices(num_slots)]
        lates = []
        for one in choices:
            in_waves, items = plan_in_gaps(batch, cost, [one], strategy)
            items.validate(in_waves)
            figures = evaluate_items(in_waves, items, cost)
            step_s = joined_step(
                made, times, in_waves, items, cost, tensor_ranks=tensor_ranks
            ).step_s
            most_s = times.makespan_s + figures.makespan_s
            assert times.makespan_s * (1 - 1e-9) <= step_s <= most_s * (1 + 1e-9), seed
            assert figures.bound_s <= figures.makespan_s * (1 + 1e-9) + 1e-12, seed
            lates.append(figures.makespan_s)
        best = evaluate_items(*plan_in_gaps(batch, cost, choices, strategy), cost)
        assert best.makespan_s == min(lates)


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 16), (8, 32)])
def test_pictures_that_fill_half_of_the_bubbles_take_no_time(stages, micro_batches):
    """Half of P (P - 1) of what a micro-batch takes on a stage, in all ranks."""
    made, times, batch = drawn(1, ranks=8, stages=stages, micro_batches=micro_batches, even=True)
    idle_s = times.makespan_s * batch.num_ranks - times.total_compute_s
    cost = scaled(batch, idle_s / 2)
    slots = batch.micro_batches
    choices = [choice(made, times, slots, one, 1) for one in wave_choices(micro_batches)]
    in_waves, items = plan_in_gaps(batch, cost, choices)
    step_s = joined_step(made, times, in_waves, items, cost).step_s
    assert step_s <= 1.02 * times.makespan_s
    before_and_behind, apart = plan_in_gaps(batch, cost, [choice(made, times, slots, ONE, 1)])
    outside_s = joined_step(made, times, before_and_behind, apart, cost).step_s
    assert outside_s >= 1.07 * times.makespan_s


def test_refusals():
    """What is no number of seconds is refused."""
    made, times, batch = drawn(0, ranks=1, stages=2, micro_batches=2)
    gaps = gaps_of(made, times, ONE)
    wrong = replace(
        batch,
        waves=np.zeros(len(batch.patches), dtype=np.int32),
        gaps=replace(gaps, free_until_s=np.array([np.nan, 0.0])),
    )
    with pytest.raises(ValueError, match="^a plan of items: found encoding free for -?nan"):
        plan_items(wrong, COST)
    with pytest.raises(ValueError, match="forward_share"):
        ItemCostModel(patch_s=1.0, forward_share=0.0)


def dealt_to_sequences(made, batch):
    """Each item's sequence, by chance, and the largest item of each sequence."""
    owners = np.random.default_rng(0).integers(0, len(made.lengths), len(batch.patches))
    found = np.zeros(len(made.lengths), dtype=np.int64)
    np.maximum.at(found, owners, batch.patches)
    return owners, found


def held(made, m):
    """What a micro-batch runs where."""
    one = made.micro_batch(m)
    return tuple(one.ranks), tuple(one.sequences), dict(one.local)


def test_large_items_go_to_the_middle(seeds):
    for seed in seeds[::16]:
        chosen = random.Random(seed)
        stages, ranks = chosen.choice([2, 4]), chosen.choice([1, 3])
        chunks, parts = chosen.choice([(1, 1), (2, 1), (1, 4)])
        is_uneven = chosen.random() < 0.5
        made, times, batch = drawn(
            seed, ranks=ranks, stages=stages, chunks=chunks, parts=parts, even=not is_uneven
        )
        _, largest = dealt_to_sequences(made, batch)
        apart = with_items_apart(made, times.duration_s, largest, times.pipeline)
        apart.validate(num_layers=1, pipeline_stages=stages)
        again = evaluate(apart, replace(COSTS, g=1e-4 * is_uneven), stages, chunks)
        assert again.duration_s == pytest.approx(times.duration_s, rel=0.031)
        assert sorted(apart.sequences) == sorted(made.sequences)
        untouched = with_items_apart(made, times.duration_s, 0 * largest, times.pipeline)
        assert [held(untouched, m) for m in range(made.num_micro_batches)] == [
            held(made, m) for m in range(made.num_micro_batches)
        ]


def test_whole_sequences_beside_a_ring_change_places_with_it():
    """Micro-batches of one ring, each with a sequence over both ranks and whole ones beside."""
    made = replace(
        plan_of([[0, 1]] * 3, [8, 8, 8, 2, 3, 2], ranks=2),
        sequence_offsets=np.arange(4),
        sequences=np.arange(3),
        local_offsets=np.array([0, 1, 1, 3]),
        local_sequences=np.array([3, 4, 5]),
        local_ranks=np.array([1, 0, 1]),
    )
    found = made.with_contents([2, 0, 1])
    before, after = ([held(one, m) for m in range(3)] for one in (made, found))
    assert after == [before[2], before[0], before[1]] and before[0][2] == {1: (3,)}
    assert found.with_contents([1, 2, 0]).fingerprint() == made.fingerprint()


def test_what_was_made_for_one_sequence_stays():
    """Streams, and what leaves the device, have parts and shares by their own length."""
    times_s, largest = np.full(3, 1.0), np.array([9, 0, 0])
    for how in ({"num_parts": [2] * 3, "streams": [True] * 3}, {"offload_ratios": [0.5] * 3}):
        made = plan_of([[0]] * 3, [8, 8, 8], ranks=1)
        made = replace(made, **{name: np.array(one) for name, one in how.items()})
        kept = with_items_apart(made, times_s, largest, Pipeline(2))
        assert kept.fingerprint() == made.fingerprint()
    plain = plan_of([[0]] * 3, [8, 8, 8], ranks=1)
    moved = with_items_apart(plain, times_s, largest, Pipeline(2))
    assert [int(moved.sequences[m]) for m in range(3)] == [1, 0, 2]


def test_pictures_that_are_not_at_the_ends_take_no_time():
    made, times, batch = drawn(1, ranks=32, stages=4, micro_batches=16, even=True)
    cost = scaled(batch, (times.makespan_s * batch.num_ranks - times.total_compute_s) / 4)
    owners, largest = dealt_to_sequences(made, batch)
    lates = []
    for one in (made, with_items_apart(made, times.duration_s, largest, times.pipeline)):
        of_sequence = np.zeros(len(made.lengths), dtype=np.int64)
        of_sequence[one.sequences] = np.repeat(
            np.arange(one.num_micro_batches), np.diff(one.sequence_offsets)
        )
        micro_batches = of_sequence[owners]
        slots = slots_of_micro_batches(one, times.pipeline)[micro_batches].astype(np.int32)
        ran = replace(batch, micro_batches=slots, consumers=one.ranks[micro_batches])
        choices = [choice(one, times, slots, starts, 1) for starts in wave_choices(16)]
        figures = evaluate_items(*plan_in_gaps(ran, cost, choices), cost)
        lates.append(figures.makespan_s / times.makespan_s)
    assert lates[1] < lates[0] / 2
