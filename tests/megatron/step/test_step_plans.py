"""What the plan of a step is made for, and what is told of the step: stages, experts, latents."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from megatron.core import parallel_state

from megatron_hdp.data.spec import PrimitivesSpec
from megatron_hdp.data.steps import PlanSettings
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.options import planned_weights, shape, stage_split
from megatron_hdp.megatron.step import HdpSteps, learning
from megatron_hdp.planner import CostModel, make_plan, plan
from megatron_hdp.planner.experts import LockstepFigures
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.planner.shape import RingWays
from tests.gradient_equivalence.case import LENGTHS
from tests.gradient_equivalence.cases import CASES, UNEVEN
from tests.support.gradients import (
    VOCABULARY,
    hdp_step,
    moe_arguments,
    tiny_arguments,
    write_corpus,
)
from tests.support.mla import errors_of_kind
from tests.support.ranks import RankError

MAKE_PLAN = "megatron_hdp.data.steps.planning.make_plan"


def what_is_planned(arguments):
    """Body of a rank: layers and stages that a step's plan is made for."""
    parallel.initialise(arguments)
    with mock.patch(MAKE_PLAN, wraps=make_plan) as planned:
        hdp_step(arguments)
    (problem, _), _ = planned.call_args
    pipeline = problem.pipeline
    return problem.cost_model.num_layers, pipeline.stages, pipeline.chunks, pipeline.weights


def test_all_ranks_plan_for_the_same_stages(run_ranks, tmp_path):
    arguments = tiny_arguments(
        write_corpus(tmp_path, LENGTHS), hdp_tokens_per_rank=200, num_layers=3, **UNEVEN
    )
    first, last = run_ranks(2, what_is_planned, arguments)
    assert first == last
    layers, stages, chunks, weights = first
    assert (layers, stages, chunks) == (2, 2, 1)
    vocabulary = building.padded_vocab_size(VOCABULARY, arguments)
    assert weights == planned_weights(arguments, vocabulary)
    assert weights[1] > 2 * weights[0]  # two layers, and the output layer


def own_layers(arguments):
    """Only those of this rank's stage, as if each rank had to count its own."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return stage_split(arguments).of_stages[stage]


def with_own_layers(arguments):
    """Body of a rank."""
    with mock.patch.object(shape, "planned_layers", own_layers):
        return what_is_planned(arguments)


def test_ranks_that_count_their_own_layers_are_stopped(run_ranks, tmp_path):
    arguments = tiny_arguments(
        write_corpus(tmp_path, LENGTHS), hdp_tokens_per_rank=200, num_layers=3, **UNEVEN
    )
    with pytest.raises(RankError, match="DisagreementError"):
        run_ranks(2, with_own_layers, arguments)


def told_of(arguments, pipeline):
    """Body of a rank: seconds of a whole HDP rank for 3 s of each stage of a pipeline."""
    found = []
    for stage in range(pipeline.stages):
        place = SimpleNamespace(
            hdp_rank=0, num_hdp_ranks=1, stage=stage, num_stages=pipeline.stages, lockstep_ranks=1
        )
        cost = CostModel(a=1e-9, b=1e-6, kv_bytes_per_token=100)
        one = learning.Learning(arguments, place, cost, PrimitivesSpec(), pipeline, has_plane=False)
        with mock.patch.object(learning, "work_of", lambda *_: np.zeros(3)):
            found.append(one._observation(mock.Mock(), mock.Mock(compute_s=3.0))[-1])
    return found


def test_a_stage_s_seconds_are_told_as_those_of_all(run_ranks, tmp_path):
    """Of a quarter of the model four times as much; what computes nothing says nothing."""
    arguments = tiny_arguments(write_corpus(tmp_path, LENGTHS))
    assert run_ranks(1, told_of, arguments, Pipeline(3, 1, (1.0, 0.0, 3.0)))[0] == [12, 0, 4]
    assert run_ranks(1, told_of, arguments, Pipeline(3))[0] == [9, 9, 9]


DOCUMENTS = [70, 44, 31, 30, 18, 9, 9, 8, 7, 5, 3]


def stepped(arguments):
    """Body of a rank: its report."""
    parallel.initialise(arguments)
    return hdp_step(arguments)[0]


def report_of(run_ranks, num, arguments):
    return run_ranks(num, stepped, arguments, timeout_s=570)[0]


@pytest.mark.parametrize(
    "stages, chunks", [*(pytest.param(one, 1, marks=pytest.mark.slow) for one in (1, 2)), (2, 2)]
)
def test_experts_across_ranks_are_planned_for_and_told(run_ranks, tmp_path, stages, chunks):
    prefix = write_corpus(tmp_path, DOCUMENTS)
    settings = {
        "num_layers": 2 * stages,
        "moe_layer_freq": f"[0]+[1]*{2 * stages - 1}",  # a dense layer sends nothing
        "num_virtual_stages_per_pipeline_rank": chunks if chunks > 1 else None,
        "hdp_strategy": "auto",
        "hdp_tokens_per_rank": 40,
        "expert_model_parallel_size": 2,
        "pipeline_model_parallel_size": stages,
    }
    arguments = moe_arguments(prefix, **settings)
    report = report_of(run_ranks, 2 * stages, arguments)
    # every rank runs equally many positions; one without a micro-batch runs padding
    assert report.num_positions >= report.micro_batches_max
    places, runs = 2 * report.num_positions, report.micro_batches_min + report.micro_batches_max
    assert report.padding_share == pytest.approx(1 - runs / places)
    values = (2 * stages - 1) * arguments.moe_router_topk * arguments.hidden_size
    assert report.all_to_all_bytes == report.tokens * values * 8 * 2 * 2 / 2  # float64, half away


def test_padding_is_counted(run_ranks, tmp_path):
    prefix = write_corpus(tmp_path, [30])  # on one of two ranks
    settings = {"hdp_strategy": "naive", "expert_model_parallel_size": 2}
    report = report_of(run_ranks, 2, moe_arguments(prefix, **settings))
    assert (report.num_positions, report.padding_share) == (1, 0.5)


def test_ranks_with_all_experts_send_nothing(run_ranks, tmp_path):
    prefix = write_corpus(tmp_path, DOCUMENTS)
    for make in (moe_arguments, tiny_arguments):
        report = report_of(run_ranks, 2, make(prefix, hdp_tokens_per_rank=60))
        assert report.all_to_all_bytes is None
        assert report.num_positions == report.micro_batches_max


@pytest.mark.parametrize("size, stages", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_what_is_drawn_waits_as_ranks_do(size, stages):
    costs = CostModel(a=1e-6, b=1e-4, b_experts=3e-4, kv_bytes_per_token=1.0)
    made = plan(
        DOCUMENTS,
        ranks=4,
        tokens_per_rank=40,
        cost_model=costs,
        pipeline_stages=stages,
        expert_parallel_size=size,
    )
    settings = SimpleNamespace(pipeline=Pipeline(stages), lockstep_ranks=size, cost_model=costs)
    settings.times_of = partial(PlanSettings.times_of, settings)
    steps = SimpleNamespace(
        _ran=lambda: SimpleNamespace(totals=SimpleNamespace(before=None)),
        latest_plan=lambda: made,
        planner=SimpleNamespace(settings_at=lambda before: settings),
    )
    drawn, times = HdpSteps.planned_times(steps)
    assert drawn is made
    assert times.makespan_s == pytest.approx(made.summary["makespan_s"], rel=1e-9)
    assert isinstance(times, LockstepFigures) == (size > 1)


WAYS = ("kv", "latent")


def bytes_of_ways(arguments, plan):
    """Body of a rank: bytes that all ranks send around rings, by what travels."""
    parallel.initialise(arguments)
    return [hdp_step(replace(arguments, hdp_mla_ring=way), plan=plan)[0].ring_bytes for way in WAYS]


def test_what_travels_is_counted(run_ranks, tmp_path):
    *_, (arguments, plan) = CASES["mla-kv-yarn"].runs(tmp_path)
    tokens = 0  # of members, once for each hop
    for i in range(plan.num_micro_batches):
        degree = int(plan.rank_offsets[i + 1] - plan.rank_offsets[i])
        rows = plan.sequences[plan.sequence_offsets[i] : plan.sequence_offsets[i + 1]]
        lengths = plan.lengths[rows].tolist() if degree > 1 else []
        tokens += (degree - 1) * sum(-(-n // (2 * degree)) * 2 * degree for n in lengths)
    assert tokens > 0
    values = {"kv": 4 * (6 + 4 + 5), "latent": 10 + 4}  # of a token in a layer
    expected = [3 * arguments.num_layers * tokens * values[way] * 8 for way in WAYS]
    assert run_ranks(3, bytes_of_ways, arguments, plan)[0] == expected


def errors_of_both_in_a_step(cases):
    """Body of a rank: errors, how often the cost model let what travel, and what went around so."""
    said, made = [], []

    def latent_in_turn(self, lengths, ring):
        said.append(sum(lengths) // 12 % 2 == 0)  # members of a ring agree
        return said[-1]

    def half_made(self, lengths, earlier, ring):
        made.append(sum(lengths) + earlier)
        return 0.5

    with (
        mock.patch.object(RingWays, "latent_is_faster", latent_in_turn),
        mock.patch.object(RingWays, "made_share", half_made),
    ):
        errors = errors_of_kind(cases)
    return errors, sum(said), len(said), made


@pytest.mark.slow
def test_rings_of_a_step_may_differ(run_ranks, tmp_path):
    """Under auto the cost model is asked for each ring; gradients of all ways add up."""
    _, *runs = CASES["mla-kv-yarn"].runs(tmp_path)
    runs = [(replace(arguments, hdp_mla_ring="auto"), plan) for arguments, plan in runs]
    errors, latents, total, made = run_ranks(3, errors_of_both_in_a_step, runs)[0]
    assert 0 < latents < total and made
    assert max(errors) <= 1e-10, errors
