"""The gold test for every kind of positions: scaled frequencies, and layers that know none."""

import pytest
import torch

from tests.megatron.step.test_exactness import (
    LAYOUTS,
    LENGTHS,
    TOLERANCE,
    drawn_lengths,
    random_case,
)
from tests.support.gradients import errors_of, tiny_arguments, write_corpus
from tests.support.random_plans import random_plan

ROOM = {"hdp_tokens_per_rank": 128, "seq_length": 200, "max_position_embeddings": 200}
YARN = {
    "position_embedding_type": "yarn",
    "kv_channels": 8,
    "rotary_base": 300,
    "rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 50,
    "yarn_beta_fast": 8.0,
}
KINDS = {
    "llama3": {"kv_channels": 8, "rotary_base": 500_000, "use_rope_scaling": True},
    "llama3-32": {"rotary_base": 500_000, "use_rope_scaling": True, "rope_scaling_factor": 32.0},
    "yarn": YARN,
    "yarn-some-layers": YARN
    | {"no_rope_freq": "[1,0]", "yarn_correction_range_round_to_int": False, "mscale": 0.7},
    "interleaved": {
        "kv_channels": 8,
        "rotary_percent": 0.5,
        "rotary_interleaved": True,
        "rotary_seq_len_interpolation_factor": 4,
    },
    "none": {"position_embedding_type": "none"},
}
QUICK = ("llama3", "yarn-some-layers")


@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in KINDS]
)
def test_gradients_equal_one_rank_over_the_whole_batch(run_ranks, tmp_path, kind):
    prefix = write_corpus(tmp_path, LENGTHS)
    arguments = tiny_arguments(prefix, **ROOM, **KINDS[kind])
    cases = [(arguments, None), random_case(arguments, 3)]
    errors = run_ranks(3, errors_of, cases)[0]
    assert max(errors) <= TOLERANCE, errors


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_layouts(run_ranks, tmp_path, layout):
    ranks, overrides = LAYOUTS[layout]
    prefix = write_corpus(tmp_path, LENGTHS)
    layers = {"num_layers": 4, "no_rope_freq": "[0,1,1,0]"}
    arguments = tiny_arguments(prefix, **(ROOM | overrides | YARN | layers))
    replicas = ranks
    for size in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        replicas //= overrides.get(size, 1)
    cases = [(arguments, None), random_case(arguments, replicas)]
    errors = run_ranks(ranks, errors_of, cases, timeout_s=570)[0]
    assert max(errors) <= TOLERANCE, errors


def test_layers_of_virtual_stages_are_counted_over_the_model(run_ranks, tmp_path):
    prefix = write_corpus(tmp_path, LENGTHS)
    virtual = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
    layers = {"num_layers": 4, "no_rope_freq": "[0,1,1,0]"}
    arguments = tiny_arguments(prefix, **ROOM, **virtual, **layers)
    plan = random_plan(drawn_lengths(arguments, LENGTHS), ranks=2, tokens_per_rank=128, seed=5)
    errors = run_ranks(4, errors_of, [(arguments, plan)])[0]
    assert max(errors) <= TOLERANCE, errors


def rows_in_order(embedding, context, transformer, hidden, config, params, **_):
    return torch.arange(len(params.positions))


def test_positions_of_the_micro_batch_are_found_out(run_ranks, tmp_path):
    prefix = write_corpus(tmp_path, LENGTHS)
    arguments = tiny_arguments(prefix, **ROOM, **YARN)
    target = "megatron_hdp.megatron.model.rotary.OwnPositionRotaryEmbedding.get_rotary_seq_len"
    errors = run_ranks(2, errors_of, [(arguments, None)], (target, rows_in_order))[0]
    assert min(errors) > 1e-3
