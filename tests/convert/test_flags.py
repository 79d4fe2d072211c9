"""What training has changed of a model stands in its configuration, in the words that it has."""

import pytest

from megatron_hdp.convert.families.flags import update
from megatron_hdp.convert.families.registry import family_of
from megatron_hdp.convert.families.rope import rope_flags

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
OLD = {**LLAMA, "rope_theta": 10000.0, "rope_scaling": None}
NEW = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
LLAMA3 = {
    "position_embedding_type": "rope",
    "rotary_base": 500000,
    "use_rope_scaling": True,
    "rope_scaling_factor": 16.0,
}
YARN = {
    "position_embedding_type": "yarn",
    "rotary_base": 500000,
    "rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 128,
    "yarn_beta_fast": 16.0,
    "yarn_beta_slow": 2.0,
    "yarn_correction_range_round_to_int": False,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}


def flags_of(config):
    return family_of(config, "").flags(config)


@pytest.mark.parametrize("config", [OLD, NEW], ids=["old words", "new words"])
@pytest.mark.parametrize("trained", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_another_base_and_scaling(config, trained):
    longer = {**flags_of(config), **trained, "max_position_embeddings": 512}
    found = update(config, flags_of(config), longer)
    assert rope_flags(found) == trained
    assert found["max_position_embeddings"] == 512
    assert found.keys() == config.keys()  # no new words among the old ones
    again = update(found, flags_of(found), {**flags_of(config), "use_rope_scaling": False})
    assert rope_flags(again) == rope_flags(config)


def test_what_a_run_does_not_use_changes_nothing():
    unused = {"rotary_scaling_factor": 1.0, "mscale": 1.0, "rope_scaling_factor": 8.0}
    unused |= {"use_rope_scaling": False, "yarn_beta_fast": 32.0, "rope_type": None}
    for config in (OLD, NEW):
        assert update(config, flags_of(config), {**flags_of(config), **unused}) == config


def test_another_model_is_refused():
    with pytest.raises(ValueError, match=r"found --num-query-groups 2, expected 4 as in config"):
        update(OLD, flags_of(OLD), {**flags_of(OLD), "num_query_groups": 2})
