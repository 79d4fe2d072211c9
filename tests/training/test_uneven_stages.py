"""Runs whose pipeline stages hold unequal numbers of layers: same curves, same checkpoints."""

from dataclasses import replace

import pytest

from tests.training import test_virtual_stages
from tests.training.test_checkpoint import BUCKETS, EXPERTS, SHARDED, largest_difference
from tests.training.test_virtual_stages import ALONE, trained, whole_run

LAYOUT = "pipeline_model_parallel_layout"
EMPTY = (2, {"pipeline_model_parallel_size": 2, LAYOUT: "E|t*4L"})
FIRST = (4, {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1})
NOTHING = (4, {"pipeline_model_parallel_size": 4, LAYOUT: "Et||t*3|L"})
ELSEWHERE = (4, {"pipeline_model_parallel_size": 4, LAYOUT: "E|t||t*3L"})
VIRTUAL = (4, {"pipeline_model_parallel_size": 2, LAYOUT: "E|t|t*3|L"})
VIRTUAL_4 = (4, {"pipeline_model_parallel_size": 4, LAYOUT: "Et|||t|t||t|L"})
APART = (4, VIRTUAL[1] | {"expert_model_parallel_size": 2})
EVEN_APART = (4, test_virtual_stages.VIRTUAL[1] | {"expert_model_parallel_size": 2})
FOUR_WITH_EXPERTS = EXPERTS | {"num_layers": 4} | SHARDED | BUCKETS


@pytest.mark.parametrize(
    "before, after, overrides, tolerance",
    [
        (NOTHING, ELSEWHERE, SHARDED | BUCKETS, 1e-10),
        pytest.param(NOTHING, VIRTUAL, {}, 1e-10, marks=pytest.mark.slow),
        pytest.param(FIRST, EMPTY, SHARDED | BUCKETS, 1e-10, marks=pytest.mark.slow),
        pytest.param(VIRTUAL, NOTHING, SHARDED | BUCKETS, 1e-10, marks=pytest.mark.slow),
        pytest.param(VIRTUAL_4, ALONE, SHARDED | BUCKETS, 1e-10, marks=pytest.mark.slow),
        pytest.param(EMPTY, FIRST, {}, 1e-10, marks=pytest.mark.slow),
        pytest.param(
            NOTHING, FIRST, SHARDED | {"fp64": False, "bf16": True}, 2e-3, marks=pytest.mark.slow
        ),
        pytest.param(APART, EVEN_APART, FOUR_WITH_EXPERTS, 1e-10, marks=pytest.mark.slow),
        pytest.param(NOTHING, APART, FOUR_WITH_EXPERTS, 1e-10, marks=pytest.mark.slow),
    ],
    ids=[
        "nothing",
        "nothing-virtual",
        "first-empty",
        "virtual-nothing",
        "to-one-rank",
        "empty",
        "bfloat16",
        "experts",
        "experts-nothing",
    ],
)
def test_resumed_on_another_split(run_ranks, tmp_path, before, after, overrides, tolerance):
    """Steps and evaluations; a stage has no layers, or nothing at all."""
    whole = whole_run(tmp_path, **overrides)
    expected = trained(run_ranks, whole, ALONE)
    folder = tmp_path / "checkpoints"
    first = trained(run_ranks, replace(whole, train_iters=3, save=folder), before)
    assert largest_difference(first, expected[:3]) <= tolerance
    found = trained(run_ranks, replace(whole, load=folder), after)
    assert [step for step, _, _ in found] == [4, 5, 6]
    assert largest_difference(found, expected[3:]) <= tolerance
