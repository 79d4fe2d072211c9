"""The training command on sounds: Qwen2-Audio's encoder as part of the model, and its data."""

import json
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from megatron_hdp.encoders import Qwen2AudioEncoder
from tests.data.media import sounds
from tests.training.runs import BUCKETS, SHARDED, largest_difference, run
from tests.training.test_pictures import ALONE, HF, HIDDEN, one_sentence, trained

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


def model_folder(folder):
    """A model's folder with the weights of an encoder."""
    torch.manual_seed(3)
    encoder = Qwen2AudioEncoder(CONFIG).double()
    for weight in encoder.parameters():
        torch.nn.init.normal_(weight, std=0.5 / max(1, weight[0].numel()) ** 0.5)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    named = {f"model.{name}": one.detach() for name, one in encoder.state_dict().items()}
    safetensors.torch.save_file(named, folder / "model.safetensors")
    return folder


def sounds_run(folder, **overrides):
    """A run over conversations with sounds, and texts."""
    data = sounds.write_mixture(folder, "some text without sounds\n" * 3)
    settings = {
        **{"hidden_size": HIDDEN, "kv_channels": 12, "num_attention_heads": 2, "num_layers": 4},
        **{"num_query_groups": 1, "seq_length": 200, "max_position_embeddings": 200},
        **{"data_path": (), "split": None, "hdp_data": data},
        **{"tokenizer_type": HF, "tokenizer_model": folder / "hf"},
        **{"hdp_tokens_per_rank": 100, "global_batch_size": 5, "weight_decay": 0.1},
        "hdp_encoder": model_folder(folder / "model"),
    }
    return run(None, **(settings | overrides))


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
    undamaged = trained(run_ranks, whole, **ALONE)  # prepares while all are whole
    sound = tmp_path / sounds.name(1)
    raw = sound.read_bytes()
    sound.write_bytes(raw[:20].ljust(len(raw), b"\0"))
    expected = trained(run_ranks, whole, hdp_corrupt_limit=20, **ALONE)
    assert largest_difference(undamaged, expected) > 1e-3
    assert largest_difference(trained(run_ranks, whole, 2, hdp_corrupt_limit=20), expected) <= 1e-10


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
