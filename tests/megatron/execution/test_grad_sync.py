"""Reductions begin in the last backward where they may, else behind it; always in one order."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from megatron_hdp.megatron import parallel
from megatron_hdp.planner.lockstep import end_together, slots
from megatron_hdp.runtime.timeline import Timeline
from tests.gradient_equivalence.case import ACROSS, LENGTHS, PP2, ROOM
from tests.gradient_equivalence.settings import virtual
from tests.support.drawn import first_rows
from tests.support.gradients import (
    hdp_steps_of,
    largest_error,
    moe_arguments,
    reference_on_first_rank,
    tiny_arguments,
    whole_gradients,
    write_corpus,
)
from tests.support.random_plans import random_plan

OVERLAP = ROOM | {"overlap_grad_reduce": True, "ddp_bucket_size": 1000}


def launches_of(arguments, plan):
    """Body of a rank: which reductions begin, by the names of what they reduce, in which span."""
    parallel.initialise(arguments)
    begun, timelines = [], []
    start, make = _ParamAndGradBucketGroup.start_grad_sync, Timeline.__init__

    def noting(group, *words, **named):
        if group.is_first_batch and group.grad_reduce_handle is not None:
            return start(group, *words, **named)  # Megatron's way to begin nothing
        spans = [kind for one in timelines for kind, _, _ in one.current()]
        sizes = [tuple(one.shape) for bucket in group.buckets for one in bucket.params_list]
        begun.append((sizes, "backward" in spans))
        return start(group, *words, **named)

    def noted(timeline, *words, **named):
        make(timeline, *words, **named)
        timelines.append(timeline)

    with (
        mock.patch.object(_ParamAndGradBucketGroup, "start_grad_sync", noting),
        mock.patch.object(Timeline, "__init__", noted),
    ):
        plans = [plan] * 3
        if arguments.hdp_sequence_parts > 1:  # others in each step
            numbers = (np.full(plan.num_micro_batches, number) for number in (2, 3, 1))
            plans = [replace(plan, num_parts=one, linear_tokens=50.0) for one in numbers]
        *_, (report, chunks) = hdp_steps_of(arguments, plans)
        grads = whole_gradients(chunks, arguments)
    expected = reference_on_first_rank(arguments)
    error = None if expected is None else largest_error((report.loss, grads), expected)
    return begun, error


def mixed_plan(arguments, ranks, *, aligned, lockstep_ranks):
    """A plan that holds some ranks back, and which."""
    lengths = np.array(LENGTHS)[first_rows(len(LENGTHS), arguments.seed)]
    for seed in range(200):
        plan = random_plan(lengths, ranks=ranks, tokens_per_rank=128, seed=seed)
        lists = slots(plan, aligned=aligned, lockstep_ranks=lockstep_ranks)
        found = end_together(plan, lists, lockstep_ranks=lockstep_ranks)
        if found.any() and not found.all():
            return plan, found.tolist()
    raise AssertionError("no plan has ranks of both kinds")


@pytest.mark.parametrize(
    ("ranks", "hdp_ranks", "experts", "overrides"),
    [
        (3, 3, False, {}),
        pytest.param(4, 4, True, ACROSS, marks=pytest.mark.slow),
        pytest.param(4, 2, False, PP2, marks=pytest.mark.slow),
        pytest.param(4, 2, False, PP2 | {"hdp_sequence_parts": 3}, marks=pytest.mark.slow),
    ],
    ids=["rings", "experts", "stages", "parts"],
)
def test_where_reductions_begin(run_ranks, tmp_path, ranks, hdp_ranks, experts, overrides):
    make = moe_arguments if experts else tiny_arguments
    arguments = make(write_corpus(tmp_path, LENGTHS), **(OVERLAP | overrides))
    is_aligned = experts or ranks > hdp_ranks
    plan, together = mixed_plan(
        arguments, hdp_ranks, aligned=is_aligned, lockstep_ranks=2 if experts else 1
    )
    arguments = replace(arguments, use_distributed_optimizer=True)
    found = run_ranks(ranks, launches_of, arguments, plan)
    assert found[0][1] <= 1e-10
    for rank, (begun, _) in enumerate(found):
        first, *later = np.array_split(np.arange(len(begun)), 3)
        stage, hdp_rank = divmod(rank, hdp_ranks)
        orders = [[begun[i][0] for i in step] for step in (first, *later)]
        assert orders[0] == orders[1] == orders[2]
        assert stage or len(orders[0]) > 1, "Megatron has one bucket on later stages"
        assert orders[0] == [sizes for sizes, _ in found[stage * hdp_ranks][0][: len(orders[0])]]
        assert not any(begun[i][1] for i in first), "Megatron only counts in the first"
        for step in later:
            assert [begun[i][1] for i in step] == [together[hdp_rank]] * len(step), rank


@pytest.mark.slow
def test_with_virtual_stages_reductions_begin_behind_the_last_backward(run_ranks, tmp_path):
    arguments = tiny_arguments(write_corpus(tmp_path, LENGTHS), **(OVERLAP | virtual(2)))
    found = run_ranks(4, launches_of, arguments, None)
    assert found[0][1] <= 1e-10
    for rank, (begun, _) in enumerate(found):
        assert not any(is_inside for _, is_inside in begun), rank
        steps = np.array_split(np.array([str(sizes) for sizes, _ in begun]), 3)
        assert (steps[0] == steps[1]).all() and (steps[0] == steps[2]).all()
        assert len(steps[0]) > 1 or rank > 1, "each chunk has one bucket at least"
        assert [sizes for sizes, _ in begun] == [sizes for sizes, _ in found[rank // 2 * 2][0]]
