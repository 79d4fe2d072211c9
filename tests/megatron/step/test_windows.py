"""The gold test for attention with windows and sinks: stock's own softmax gives the reference."""

import pytest

from megatron_hdp.runtime.ring.halo import Halo
from tests.megatron.step import test_offload
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
SHORT = {"window_size": "9,0"}  # shorter than chunks of most plans
LONG = {"window_size": "70,0"}  # over several of them
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
CASES |= {
    "window": (3, 2, SHORT),
    "alternating": (3, 3, LONG | {"window_attn_skip_freq": "2"}),
    "own-token": (2, 2, SINK | {"window_size": "0,0"}),
    "both-tensor": (4, 2, SHORT | SINK | TENSOR | {"window_attn_skip_freq": "[1,0]"}),
    "both-stages": (4, 2, LONG | SINK | TWO_STAGES | {"window_attn_skip_freq": "[0,1]"}),
    "both-virtual": (
        4,
        4,
        SHORT
        | OFF_BY_ONE
        | TWO_STAGES
        | RECOMPUTE
        | SHARDED_BUCKETS
        | {"num_virtual_stages_per_pipeline_rank": 2, "window_attn_skip_freq": "2"},
    ),
    "selective": (4, 2, LONG | SINK | {"recompute_granularity": "selective"}),
}
QUICK = ("sink", "alternating", "both-tensor")


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


def forgets_the_halo(self, dk, dv, comm):
    """Gradients of what came from other ranks are lost."""
    return dk[self.own], dv[self.own]


def one_token_less(layout, window):
    return HALO(layout, window - 1)


HALO = Halo.of


@pytest.mark.parametrize(
    "fault",
    [
        ("megatron_hdp.runtime.ring.halo.Halo.home", forgets_the_halo),
        ("megatron_hdp.runtime.ring.windowed.Halo.of", one_token_less),
    ],
    ids=["halo-forgotten", "halo-too-short"],
)
def test_a_planted_fault_fails_the_check(run_ranks, tmp_path, fault):
    case = tiny_arguments(write_corpus(tmp_path, LENGTHS), hdp_strategy="naive", **SHORT)
    errors = run_ranks(4, errors_of, [(case, None)], fault)
    assert min(errors[0]) > 1e-6, errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("window", [SHORT, LONG], ids=["short", "long"])
def test_offload_has_the_bits_of_a_step_without(run_ranks, tmp_path, window):
    arguments = tiny_arguments(
        write_corpus(tmp_path, test_offload.LENGTHS),
        num_layers=4,
        window_attn_skip_freq="2",
        **test_offload.CAPACITY | window | SINK,
    )
    test_offload.check(run_ranks, arguments, 2, 2)
