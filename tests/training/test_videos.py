"""The training command on videos: an encoder of pictures as part of the model, and its data."""

import pytest

from megatron_hdp.encoders import Qwen3VLEncoder, Qwen25VLEncoder
from tests.data.media import videos
from tests.training import test_pictures
from tests.training.media_runs import (
    ALONE,
    HIDDEN,
    media_run,
    require_damage_left_out,
    trained,
    write_encoder,
)
from tests.training.runs import BUCKETS, SHARDED, largest_difference

pytest.importorskip("jinja2", reason="pip install 'megatron-hdp[data]'")
pytest.importorskip("transformers", reason="pip install 'megatron-hdp[tokenizers]'")
pytestmark = pytest.mark.slow

QWEN_2_5 = {
    "model_type": "qwen2_5_vl",
    "text_config": {"rope_parameters": {"mrope_section": [2, 2, 2]}},
    "vision_config": {
        **{"depth": 2, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2},
        **{"out_hidden_size": HIDDEN, "tokens_per_second": 4, "fullatt_block_indexes": [1]},
    },
}
MODELS = {
    "qwen2.5-vl": (Qwen25VLEncoder, QWEN_2_5, 3000),
    "qwen3-vl": (Qwen3VLEncoder, test_pictures.CONFIG, 16_000),
}


def videos_run(folder, name, **overrides):
    """A run over conversations with videos, and texts."""
    kind, config, most_pixels = MODELS[name]
    data = videos.write_mixture(folder, name, most_pixels, "some text without videos\n" * 3)
    return media_run(folder, data, write_encoder(folder / "model", kind, config), **overrides)


@pytest.mark.parametrize("name", MODELS)
def test_a_run_is_that_of_one_rank(run_ranks, tmp_path, name):
    """Losses and the norm of all gradients, step by step, while all weights move."""
    whole = videos_run(tmp_path, name, steps=3)
    expected = trained(run_ranks, whole, **ALONE)
    found = trained(run_ranks, whole, 3, **SHARDED, **BUCKETS)
    assert largest_difference(found, expected) <= 1e-10
    assert all(items and rows > items for *_, items, rows in found)
    assert len({loss for _, loss, *_ in found}) == 3


def test_a_damaged_video_leaves_with_its_sequence(run_ranks, tmp_path):
    whole = videos_run(tmp_path, "qwen2.5-vl", steps=3)
    video = tmp_path / videos.name(1)
    require_damage_left_out(
        run_ranks, whole, video, lambda raw: raw[: len(raw) // 2].ljust(len(raw), b"\0")
    )


def test_movies_are_decoded_for_a_run(run_ranks, tmp_path):
    """An MP4 under another name, and one that is damaged once it is prepared."""
    pytest.importorskip("av", reason="no PyAV: pip install 'megatron-hdp[video]'")
    whole = videos_run(tmp_path, "qwen3-vl", steps=3)
    for number in range(3):
        movie = videos.as_movie(videos.frames(number), "mp4")
        (tmp_path / videos.name(number)).write_bytes(movie)
    expected = trained(run_ranks, whole, **ALONE)
    assert largest_difference(trained(run_ranks, whole, 3), expected) <= 1e-10
    require_damage_left_out(
        run_ranks,
        whole,
        tmp_path / videos.name(1),
        lambda _: movie.ljust(10_000, b"\0"),
        healthy=expected,
    )


def test_loaders_beside_the_ranks_give_the_same(run_ranks, tmp_path):
    pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")
    whole = videos_run(tmp_path, "qwen3-vl", steps=3)
    expected = trained(run_ranks, whole, 2)
    assert trained(run_ranks, whole, 2, hdp_loaders="ray") == expected
