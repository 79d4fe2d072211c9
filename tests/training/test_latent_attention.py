"""Runs with multi-latent attention: saved on one layout, resumed on another, whatever travels."""

from dataclasses import replace

import pytest
from megatron.core import dist_checkpointing

from tests.support.gradients import EXPERTS, write_corpus
from tests.support.mla import mla_arguments
from tests.training.test_checkpoint import (
    BUCKETS,
    LENGTHS,
    SHARDED,
    curve,
    largest_difference,
    run,
)

SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
STAGES = {"pipeline_model_parallel_size": 2}
KEYS = (
    *("linear_q_down_proj.weight", "linear_q_up_proj.weight", "linear_q_up_proj.layer_norm_weight"),
    *("linear_kv_down_proj.weight", "linear_kv_up_proj.weight"),
    *("linear_kv_up_proj.layer_norm_weight", "linear_proj.weight"),
)
"""Of attention, as TransformerEngine's layers name them."""


@pytest.mark.parametrize(
    "ranks, layout",
    [
        (4, SEQUENCE | {"hdp_mla_ring": "latent"}),
        pytest.param(2, STAGES | {"hdp_mla_ring": "kv"}, marks=pytest.mark.slow),
        pytest.param(1, {"hdp_tokens_per_rank": 200}, marks=pytest.mark.slow),
    ],
    ids=["tp2-sp", "pp2", "one-rank"],
)
def test_it_continues_on_another_layout(run_ranks, tmp_path, ranks, layout):
    whole = run(
        write_corpus(tmp_path, LENGTHS),
        mla_arguments,
        hdp_tokens_per_rank=128,
        hdp_mla_ring="latent",
        **SHARDED,
        **BUCKETS,
    )
    folder = tmp_path / "checkpoints"
    expected = run_ranks(2, curve, replace(whole, save=folder, save_interval=3))[0]
    found = run_ranks(ranks, curve, replace(whole, load=folder, ckpt_step=3, **layout))[0]
    assert [step for step, _ in found] == [4, 5, 6]
    assert largest_difference(found, expected[3:]) <= 1e-10


def saved_keys(arguments):
    """Body of a rank: what the checkpoint of a run holds of its layers."""
    curve(arguments)
    found = dist_checkpointing.load_tensors_metadata(str(arguments.save / "iter_0000001"))
    return sorted(name for name in found if name.startswith("decoder.layers."))


@pytest.mark.parametrize("has_experts", [False, True])
def test_norms_are_named_as_transformer_engines(run_ranks, tmp_path, has_experts):
    experts = EXPERTS if has_experts else {}
    settings = {"train_iters": 1, "hdp_tokens_per_rank": 200, **experts}
    arguments = run(write_corpus(tmp_path, LENGTHS), mla_arguments, **settings)
    keys = run_ranks(1, saved_keys, replace(arguments, save=tmp_path / "checkpoints"))[0]
    for name in (f"self_attention.{key}" for key in KEYS):
        assert any(key.endswith(name) for key in keys), (name, keys)
    assert not any("q_layernorm" in key or "kv_layernorm" in key for key in keys)
    alone = any(key.endswith("pre_mlp_layernorm.weight") for key in keys)
    assert alone == has_experts
    assert any(key.endswith("linear_fc1.layer_norm_weight") for key in keys) != has_experts
