"""A step of ranks that share experts: gradients under plans of several stages, and its figures."""

from types import SimpleNamespace

import pytest

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.step import HdpSteps
from megatron_hdp.planner import CostModel, plan
from megatron_hdp.planner.experts import LockstepFigures
from megatron_hdp.planner.pipeline import Pipeline
from tests.support.gradients import (
    hdp_step,
    largest_error,
    moe_arguments,
    reference_on_first_rank,
    tiny_arguments,
    write_corpus,
)

LENGTHS = [70, 44, 31, 30, 18, 9, 9, 8, 7, 5, 3]


def stepped(arguments):
    """Body of a rank: its report, and how far gradients are from those of one rank."""
    parallel.initialise(arguments)
    report, gradients = hdp_step(arguments)
    expected = reference_on_first_rank(arguments)
    if expected is None:
        return report, None
    return report, largest_error((report.loss, gradients), expected)


def reports(run_ranks, num, arguments):
    found = run_ranks(num, stepped, arguments, timeout_s=570)
    assert found[0][1] <= 1e-10
    return found[0][0]


@pytest.mark.parametrize(
    "stages, chunks", [(1, 1), pytest.param(2, 1, marks=pytest.mark.slow), (2, 2)]
)
def test_experts_across_ranks_are_planned_for_and_told(run_ranks, tmp_path, stages, chunks):
    prefix = write_corpus(tmp_path, LENGTHS)
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
    report = reports(run_ranks, 2 * stages, arguments)
    # every rank runs equally many positions; one without a micro-batch runs padding
    assert report.num_positions >= report.micro_batches_max
    places, runs = 2 * report.num_positions, report.micro_batches_min + report.micro_batches_max
    assert report.padding_share == pytest.approx(1 - runs / places)
    values = (2 * stages - 1) * arguments.moe_router_topk * arguments.hidden_size
    assert report.all_to_all_bytes == report.tokens * values * 8 * 2 * 2 / 2  # float64, half away


def test_padding_is_counted(run_ranks, tmp_path):
    prefix = write_corpus(tmp_path, [30])  # on one of two ranks
    settings = {"hdp_strategy": "naive", "expert_model_parallel_size": 2}
    report = reports(run_ranks, 2, moe_arguments(prefix, **settings))
    assert (report.num_positions, report.padding_share) == (1, 0.5)


def test_ranks_with_all_experts_send_nothing(run_ranks, tmp_path):
    prefix = write_corpus(tmp_path, LENGTHS)
    for make in (moe_arguments, tiny_arguments):
        report = reports(run_ranks, 2, make(prefix, hdp_tokens_per_rank=60))
        assert report.all_to_all_bytes is None
        assert report.num_positions == report.micro_batches_max


@pytest.mark.parametrize("size, stages", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_what_is_drawn_waits_as_ranks_do(size, stages):
    costs = CostModel(a=1e-6, b=1e-4, b_experts=3e-4, kv_bytes_per_token=1.0)
    made = plan(
        LENGTHS,
        ranks=4,
        tokens_per_rank=40,
        cost_model=costs,
        pipeline_stages=stages,
        expert_parallel_size=size,
    )
    settings = SimpleNamespace(pipeline=Pipeline(stages), lockstep_ranks=size, cost_model=costs)
    steps = SimpleNamespace(
        latest=SimpleNamespace(totals=SimpleNamespace(before=None)),
        latest_plan=lambda: made,
        planner=SimpleNamespace(settings_at=lambda before: settings),
    )
    drawn, times = HdpSteps.planned_times(steps)
    assert drawn is made
    assert times.makespan_s == pytest.approx(made.summary["makespan_s"], rel=1e-9)
    assert isinstance(times, LockstepFigures) == (size > 1)
