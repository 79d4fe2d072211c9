"""What training has changed of a model stands in its configuration, in the words that it has."""

from dataclasses import fields

import pytest

from megatron_hdp.convert.families.flags import FREE, WRITTEN_BACK, update
from megatron_hdp.convert.families.registry import family_of
from megatron_hdp.convert.families.rope import rope_flags
from megatron_hdp.megatron.options import TrainingArguments
from tests.convert.models import MODELS, config_of

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


@pytest.mark.parametrize("name", MODELS)
def test_what_a_family_says_is_kept_or_refused(name):
    """No flag of a family is lost on the way back: training may change it, or it decides."""
    config = config_of(name).to_dict() | {"architectures": [f"{MODELS[name][0]}ForCausalLM"]}
    flags = flags_of(config)
    changed = {flag: (value, "another") for flag, value in flags.items()}
    assert update(config, flags, {**flags, **{flag: changed[flag] for flag in FREE & flags.keys()}})
    deciding = flags.keys() - {*FREE, *WRITTEN_BACK}
    assert len(deciding) >= 10
    for flag in deciding:
        with pytest.raises(ValueError, match=f"another model: found --{flag.replace('_', '-')} "):
            update(config, flags, {**flags, flag: changed[flag]})


def test_a_flag_that_a_new_family_brings_decides():
    flags = {**flags_of(OLD), "never_heard_of": 1}
    with pytest.raises(ValueError, match="found --never-heard-of 2, expected 1"):
        update(OLD, flags, {**flags, "never_heard_of": 2})


def test_what_may_change_are_flags_of_training():
    assert {*FREE, *WRITTEN_BACK} <= {item.name for item in fields(TrainingArguments)}
