"""The training command on sounds: Qwen2-Audio's encoder as part of the model, and its data."""

from dataclasses import replace

import pytest

from megatron_hdp.encoders import Qwen2AudioEncoder
from tests.data.media import sounds
from tests.training.media_runs import (
    ALONE,
    HIDDEN,
    media_run,
    one_sentence,
    require_damage_left_out,
    trained,
    write_encoder,
)
from tests.training.runs import BUCKETS, SHARDED, largest_difference

pytest.importorskip("jinja2", reason="pip install 'megatron-hdp[data]'")
pytest.importorskip("transformers", reason="pip install 'megatron-hdp[tokenizers]'")
pytestmark = pytest.mark.slow

CONFIG = {
    "model_type": "qwen2_audio",
    "text_config": {"hidden_size": HIDDEN},
    "audio_config": {
        **{"num_mel_bins": 128, "d_model": 16, "encoder_layers": 2, "encoder_ffn_dim": 20},
        **{"encoder_attention_heads": 2, "max_source_positions": 1500},
    },
}


def sounds_run(folder, **overrides):
    """A run over conversations with sounds, and texts."""
    data = sounds.write_mixture(folder, "some text without sounds\n" * 3)
    encoder = write_encoder(folder / "model", Qwen2AudioEncoder, CONFIG)
    return media_run(folder, data, encoder, **overrides)


def test_a_run_is_that_of_one_rank(run_ranks, tmp_path):
    """Losses and the norm of all gradients, step by step, while all weights move."""
    whole = sounds_run(tmp_path, steps=4)
    expected = trained(run_ranks, whole, **ALONE)
    found = trained(run_ranks, whole, 3, **SHARDED, **BUCKETS)
    assert largest_difference(found, expected) <= 1e-10
    assert all(items and rows > items for *_, items, rows in found)
    assert len({loss for _, loss, *_ in found}) == 4


def test_a_damaged_sound_leaves_with_its_sequence(run_ranks, tmp_path):
    whole = sounds_run(tmp_path, steps=3)
    sound = tmp_path / sounds.name(1)
    require_damage_left_out(run_ranks, whole, sound, lambda raw: raw[:20].ljust(len(raw), b"\0"))


def test_loaders_beside_the_ranks_give_the_same(run_ranks, tmp_path):
    pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")
    whole = sounds_run(tmp_path, steps=3)
    expected = trained(run_ranks, whole, 2)
    assert trained(run_ranks, whole, 2, hdp_loaders="ray") == expected


def test_an_encoder_of_pictures_refuses_sounds(run_ranks, tmp_path):
    from tests.training import test_pictures

    pictures = test_pictures.model_folder(tmp_path / "pictures")
    whole = sounds_run(tmp_path, steps=1, hdp_encoder=pictures)
    said = run_ranks(1, one_sentence, replace(whole, **ALONE))[0]
    assert "found a StoredSound, expected a picture or a video" in said
