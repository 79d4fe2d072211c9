"""Language models of shipped configurations are those of the published models of pictures."""

from dataclasses import fields
from pathlib import Path

import pytest

from megatron_hdp.convert.families.flags import as_yaml
from megatron_hdp.convert.families.registry import family_of, flags_of
from megatron_hdp.convert.families.vision import language_of
from megatron_hdp.megatron.options import parse_arguments
from megatron_hdp.megatron.options.model_options import ModelOptions, PositionOptions

OTHERWISE = {"max_position_embeddings", "make_vocab_size_divisible_by", "group_query_attention"}
"""A length, padding, and whether as many groups as heads are called groups: no other model."""
CONFIGS = Path(__file__).parents[2] / "configs" / "models"
TRAINING = [
    *("--train-iters=1", "--lr=0.1", "--hdp-global-batch-tokens=65536", "--attention-dropout=0"),
    *("--hybrid-data-parallel", "--hdp-tokens-per-rank=4096", "--seq-length=4096"),
]
_LAYERS = {"num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944}
PUBLISHED = {
    "qwen2.5-vl-7b": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        **_LAYERS,
        **{"model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_key_value_heads": 4},
        **{"vocab_size": 152064, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6},
        **{"hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": 128000},
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {},
    },
    "qwen3-vl-8b": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": {
            **{"model_type": "qwen3_vl_text", "num_hidden_layers": 36, "hidden_size": 4096},
            **{"intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8},
            **{"head_dim": 128, "vocab_size": 151936, "rope_theta": 5000000, "hidden_act": "silu"},
            **{"rms_norm_eps": 1e-6, "attention_bias": False, "max_position_embeddings": 262144},
            "rope_scaling": {"mrope_section": [24, 20, 20], "rope_type": "default"},
        },
        "vision_config": {},
    },
    "llava-1.5-7b": {
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {
            **{"model_type": "llama", "vocab_size": 32064, "rms_norm_eps": 1e-5},
            **{"hidden_act": "silu", "max_position_embeddings": 4096},
        },
        "vision_config": {},
    },
}
"""What their config.json say of the language model."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_models_are_the_published_ones(name, tmp_path):
    """The file in configs/models and the flags that convert writes say the same."""
    language = language_of(PUBLISHED[name])
    flags = flags_of(family_of(language, name), language, name)
    (tmp_path / "converted.yaml").write_text(as_yaml(flags, name))
    parts = [str(CONFIGS / f"{part}.yaml") for part in ("common", name)]
    (tmp_path / "shipped.yaml").write_text(f"config: {parts}\n")
    found, expected = (
        parse_arguments(
            [f"--config={tmp_path / file}.yaml", *TRAINING],
            needs_data=False,
        )
        for file in ("shipped", "converted")
    )
    shape = {item.name for kind in (ModelOptions, PositionOptions) for item in fields(kind)}
    shape -= OTHERWISE
    assert {key: getattr(found, key) for key in shape} == {
        key: getattr(expected, key) for key in shape
    }
