"""The gold test for pipeline stages of unequal layers, some without any; and with offload."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from megatron.core import parallel_state

from megatron_hdp.data.spec import PrimitivesSpec
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.options import (
    expert_layers_of_chunk,
    planned_weights,
    stage_split,
)
from megatron_hdp.megatron.step import learning, setup
from megatron_hdp.planner import CostModel, plan
from megatron_hdp.planner.pipeline import Pipeline
from tests.megatron.step import test_offload
from tests.megatron.step.test_exactness import (
    LENGTHS,
    MODELS,
    SHARDED_BUCKETS,
    TOLERANCE,
    random_case,
)
from tests.support.gradients import (
    EXPERTS,
    VOCABULARY,
    errors_of,
    hdp_step,
    tiny_arguments,
    write_corpus,
)
from tests.support.ranks import RankError

LAYOUT = "pipeline_model_parallel_layout"
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
FIRST = {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1}
BLOCK = RECOMPUTE | {"recompute_method": "block"}
CASES = {  # ranks, stages, layers, the rest
    "first": (4, 2, 3, {"decoder_first_pipeline_num_layers": 1}),
    "virtual-empty": (4, 2, 4, {LAYOUT: "E|t|tt|tL"} | SHARDED_BUCKETS | RECOMPUTE),
    "empty": (
        4,
        4,
        3,
        {LAYOUT: "Et||tt|L"} | SHARDED_BUCKETS | MODELS["mha-tied-layernorm"],
    ),
    "last-only-output": (2, 2, 2, {LAYOUT: "Ett|L"} | BLOCK),
    "last": (4, 2, 3, {"decoder_last_pipeline_num_layers": 1} | BLOCK),
    "first-virtual": (
        4,
        2,
        6,
        {"decoder_first_pipeline_num_layers": 2, "num_virtual_stages_per_pipeline_rank": 2},
    ),
    "counted": (
        4,
        4,
        6,
        {
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        }
        | MODELS["mqa-qknorm-qkvbias"],
    ),
    "counted-virtual": (
        4,
        4,
        7,
        {"account_for_loss_in_pipeline_split": True, "num_virtual_stages_per_pipeline_rank": 2},
    ),
    "virtual-4": (4, 4, 6, {LAYOUT: "E|t|t|tt||t|t|L"} | MODELS["mha-tied-layernorm"]),
    "virtual-3": (4, 2, 5, {LAYOUT: "Et|t||tt|t|L"}),
    "tensor": (
        4,
        2,
        3,
        {LAYOUT: "E|t*3L", "tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "experts": (4, 2, 3, {LAYOUT: "Et|ttL"} | EXPERTS),
    "rings-4": (8, 4, 5, {LAYOUT: "E|tt||tttL"}),
    "rings-4-virtual": (8, 4, 6, {LAYOUT: "E|t|t|tt||t|t|L"}),
}
QUICK = ("first", "virtual-empty", "empty")


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in CASES]
)
def test_gradients_of_uneven_stages(run_ranks, tmp_path, name):
    ranks, stages, layers, overrides = CASES[name]
    prefix = write_corpus(tmp_path, LENGTHS)
    replicas = ranks // stages // overrides.get("tensor_model_parallel_size", 1)
    common = {"hdp_tokens_per_rank": 128 if replicas > 1 else 200, "seq_length": 200}
    common |= {"num_layers": layers, "pipeline_model_parallel_size": stages} | overrides
    cases = [
        (tiny_arguments(prefix, hdp_strategy=strategy, **common), None)
        for strategy in ("static", "pp-balance")
    ]
    cases.append(random_case(tiny_arguments(prefix, **common), replicas))
    errors = run_ranks(ranks, errors_of, cases, timeout_s=570)[0]
    assert max(errors) <= TOLERANCE, errors


def layers_of_the_other_stage(arguments, stage, chunk):
    """The first stage builds what belongs on the last one, and the other way round."""
    stages = arguments.pipeline_model_parallel_size
    return expert_layers_of_chunk(arguments, stages - 1 - stage, chunk)


def errors_with_layers_elsewhere(case):
    """Body of a rank: `errors_of` a model whose stages have exchanged their layers."""
    with mock.patch.object(building, "expert_layers_of_chunk", layers_of_the_other_stage):
        return errors_of([(case, None)])


def test_layers_on_the_wrong_stage_fail(run_ranks, tmp_path):
    case = tiny_arguments(
        write_corpus(tmp_path, LENGTHS), hdp_tokens_per_rank=200, num_layers=3, **FIRST
    )
    with pytest.raises(RankError, match="AssertionError"):
        run_ranks(2, errors_with_layers_elsewhere, case)


def what_is_planned(arguments):
    """Body of a rank: layers and stages that a step's plan is made for."""
    parallel.initialise(arguments)
    seen = []

    def noting(*lengths, **options):
        seen.append(options)
        return plan(*lengths, **options)

    hdp_step(arguments, ("megatron_hdp.data.steps.planning.plan", noting))
    names = "pipeline_stages", "virtual_stages", "stage_weights"
    return seen[-1]["cost_model"].num_layers, *(seen[-1][name] for name in names)


def test_all_ranks_plan_for_the_same_stages(run_ranks, tmp_path):
    arguments = tiny_arguments(
        write_corpus(tmp_path, LENGTHS), hdp_tokens_per_rank=200, num_layers=3, **FIRST
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
    with mock.patch.object(setup, "planned_layers", own_layers):
        return what_is_planned(arguments)


def test_ranks_that_count_their_own_layers_are_stopped(run_ranks, tmp_path):
    arguments = tiny_arguments(
        write_corpus(tmp_path, LENGTHS), hdp_tokens_per_rank=200, num_layers=3, **FIRST
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


@pytest.mark.parametrize(
    "overrides",
    [
        {LAYOUT: "Et*3|t*4L"},
        pytest.param({LAYOUT: "E|tt|t*4|tt,L"}, marks=pytest.mark.slow),
        pytest.param({LAYOUT: "Et*3|t*5L"} | RECOMPUTE, marks=pytest.mark.slow),
    ],
    ids=["plain", "virtual", "recompute"],
)
def test_a_step_with_offload_has_the_bits_of_one_without(run_ranks, tmp_path, overrides):
    settings = test_offload.CAPACITY | {"pipeline_model_parallel_size": 2} | overrides
    settings["num_layers"] = overrides[LAYOUT].replace("t*", "").count("t")
    settings["num_layers"] += sum(int(one) for one in overrides[LAYOUT] if one.isdigit())
    arguments = tiny_arguments(write_corpus(tmp_path, test_offload.LENGTHS), **settings)
    test_offload.check(run_ranks, arguments, 2, 4)


def planned_offload(arguments):
    """Body of a rank: what offload came to, and the layers that the plan counted with."""
    with mock.patch("megatron_hdp.data.steps.planning.plan", wraps=plan) as planned:
        offloaded_bytes, _, askers = test_offload.planned_offload(arguments)
    return offloaded_bytes, askers, planned.call_args.kwargs["cost_model"].num_layers


@pytest.mark.parametrize("layout", ["Et*3|t*4L", "E|t|t*3|t*3,L"], ids=["plain", "virtual"])
def test_offload_is_planned_for_the_stage_of_the_fewest_layers(run_ranks, tmp_path, layout):
    """A sequence beyond the two ranks' capacity, with a cost model of the stage that has most."""
    settings = {"seq_length": 180, "max_position_embeddings": 180, "hdp_tokens_per_rank": 80}
    settings |= {"num_layers": 7, "pipeline_model_parallel_size": 2, LAYOUT: layout}
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
