"""The gold test for attention with a sink: stock's own softmax gives the reference."""

import pytest

from tests.megatron.step.test_exactness import (
    LENGTHS,
    SHARDED_BUCKETS,
    TOLERANCE,
    TWO_STAGES,
    random_case,
)
from tests.support.gradients import errors_of, tiny_arguments, write_corpus

SINK = {"softmax_type": "learnable"}
OFF_BY_ONE = {"softmax_type": "off-by-one"}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
CASES = {  # ranks, layers, the rest
    "sink": (3, 2, SINK),
    "off-by-one": (2, 2, OFF_BY_ONE | {"recompute_granularity": "selective"}),
    "sink-tensor": (4, 2, SINK | TENSOR),
    "sink-virtual": (
        4,
        4,
        SINK
        | TWO_STAGES
        | RECOMPUTE
        | SHARDED_BUCKETS
        | {"num_virtual_stages_per_pipeline_rank": 2},
    ),
}
QUICK = ("sink",)


def cases_of(folder, ranks, layers, overrides):
    """Plans of two strategies and one of rings that no strategy would make."""
    prefix = write_corpus(folder, LENGTHS)
    replicas = ranks // overrides.get("pipeline_model_parallel_size", 1)
    replicas //= overrides.get("tensor_model_parallel_size", 1)
    common = {"hdp_tokens_per_rank": 128 if replicas > 1 else 200, "seq_length": 200}
    common |= {"num_layers": layers} | overrides
    cases = [
        (tiny_arguments(prefix, hdp_strategy=strategy, **common), None)
        for strategy in ("static", "pp-balance")
    ]
    return [*cases, random_case(tiny_arguments(prefix, **common), replicas)]


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in CASES]
)
def test_gradients_equal_one_rank_over_the_whole_batch(run_ranks, tmp_path, name):
    errors = run_ranks(CASES[name][0], errors_of, cases_of(tmp_path, *CASES[name]), timeout_s=570)
    assert max(errors[0]) <= TOLERANCE, errors[0]
