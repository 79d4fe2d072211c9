"""Checkpoints of multi-latent attention name their tensors as TransformerEngine does."""

from dataclasses import replace

import pytest
from megatron.core import dist_checkpointing

from tests.support.gradients import EXPERTS, write_corpus
from tests.support.mla import mla_arguments
from tests.training.test_checkpoint import LENGTHS, curve, run

KEYS = (
    *("linear_q_down_proj.weight", "linear_q_up_proj.weight", "linear_q_up_proj.layer_norm_weight"),
    *("linear_kv_down_proj.weight", "linear_kv_up_proj.weight"),
    *("linear_kv_up_proj.layer_norm_weight", "linear_proj.weight"),
)
"""Of attention, as TransformerEngine's layers name them."""


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
