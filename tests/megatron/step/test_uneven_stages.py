"""Uneven pipeline stages, some without a layer: what is planned for them, with offload too."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from megatron.core import parallel_state

from megatron_hdp.data.spec import PrimitivesSpec
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.options import (
    planned_weights,
    shape,
    stage_split,
)
from megatron_hdp.megatron.step import learning
from megatron_hdp.planner import CostModel, make_plan
from megatron_hdp.planner.pipeline import Pipeline
from tests.gradient_equivalence.case import LENGTHS
from tests.gradient_equivalence.cases import UNEVEN
from tests.megatron.step import test_offload
from tests.support.gradients import (
    VOCABULARY,
    hdp_step,
    tiny_arguments,
    write_corpus,
)
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


def planned_offload(arguments):
    """Body of a rank: what offload came to, and the layers that the plan counted with."""
    with mock.patch(MAKE_PLAN, wraps=make_plan) as planned:
        offloaded_bytes, _, askers = test_offload.planned_offload(arguments)
    return offloaded_bytes, askers, planned.call_args.args[0].cost_model.num_layers


@pytest.mark.parametrize("layout", ["Et*3|t*4L", "E|t|t*3|t*3,L"], ids=["plain", "virtual"])
def test_offload_is_planned_for_the_stage_of_the_fewest_layers(run_ranks, tmp_path, layout):
    """A sequence beyond the two ranks' capacity, with a cost model of the stage that has most."""
    settings = {"seq_length": 180, "max_position_embeddings": 180, "hdp_tokens_per_rank": 80}
    settings |= {
        "num_layers": 7,
        "pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_layout": layout,
    }
    cost = CostModel(
        a=1e-3, b=1e-3, kv_bytes_per_token=1, activation_bytes_per_token=1.0, num_layers=4
    )
    path = tmp_path / "cost.json"
    path.write_bytes(cost.to_json())
    prefix = write_corpus(tmp_path, [180, 20, 30])
    arguments = tiny_arguments(prefix, hdp_offload="auto", hdp_cost_model=path, **settings)
    for offloaded_bytes, askers, layers in run_ranks(4, planned_offload, arguments):
        assert layers == 3
        assert offloaded_bytes > 0
        assert set(askers) == {"reserve"}, "host memory was asked for inside of a forward"
