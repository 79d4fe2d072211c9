"""Encoders against transformers: rows, gradients, pixels, positions, names of weights."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megatron_hdp.encoders import LlavaEncoder, Pixels, load_encoder
from megatron_hdp.media import Patches, Sound, row_positions
from tests.support.vision_models import (
    MODELS,
    drawn_patches,
    encoder_of,
    grids_of,
    hugging_face,
    tensors_of,
)


def numbers_of(encoder, items):
    """What transformers' processors would give to the model."""
    return torch.cat(
        [encoder._frames(encoder.pixels.of(torch.from_numpy(x.values))) for x in items]
    )


def rows_of_theirs(name, model, encoder, items):
    """All levels side by side; of sound those of its frames, by masked attention."""
    if name == "qwen2-audio":
        windows = torch.stack([torch.from_numpy(one.values) for one in items])
        states = torch.tensor([(one.num_frames + 1) // 2 for one in items])
        mask = (torch.arange(200) < states[:, None])[:, None, None].expand(-1, 1, 200, -1)
        found = model.model.audio_tower(windows, attention_mask=mask).last_hidden_state
        rows = model.model.multi_modal_projector(found)
        return torch.cat([one[: n // 2] for one, n in zip(rows, states.tolist(), strict=True)])
    numbers = numbers_of(encoder, items)
    if name.startswith("llava"):
        side, patch = items[0].grid[1], encoder.shape.resizing.patch
        cells = numbers.reshape(len(items), side, side, 3, patch, patch)
        pictures = cells.permute(0, 3, 1, 4, 2, 5).reshape(len(items), 3, side * patch, -1)
        return torch.cat(model.get_image_features(pictures).pooler_output)
    found = model.model.visual(numbers, grid_thw=torch.tensor([one.grid for one in items]))
    return torch.cat([found.pooler_output, *getattr(found, "deepstack_features", [])], dim=1)


def distance(found, expected):
    """The largest, as a share of the largest number."""
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-2)).item()


@pytest.mark.parametrize("name", MODELS)
def test_rows_and_gradients(name):
    """The same from one call with all items, and item by item."""
    model = hugging_face(name)
    encoder = encoder_of(name, model)
    items = drawn_patches(encoder, grids_of(name))
    theirs = rows_of_theirs(name, model, encoder, items)
    ours = encoder(items)
    assert distance(ours, theirs) < 1e-5
    alone = torch.cat([encoder([one]) for one in items])
    assert distance(alone, ours) < 1e-5
    assert len(ours) == sum(encoder.grid(one).num_rows for one in items)

    weights = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
    (theirs * weights).sum().backward()
    (ours * weights).sum().backward()
    mine = dict(encoder.named_parameters())
    for weight, gradient in gradients_of(name, model).items():
        found = mine[weight].grad
        assert (found is None) == (gradient is None), weight
        if found is not None:
            assert distance(found, gradient) < 1e-4, weight


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
def test_pairs_of_frames_make_the_rows_of_their_video(name):
    """As data have them: each is an item, whose positions continue those of the one before."""
    model = hugging_face(name)
    encoder = encoder_of(name, model)
    (video,) = drawn_patches(encoder, [(3, 8, 12)])
    video = replace(video, seconds=0.7)
    parts = [
        Patches(values, (1, 8, 12), video.seconds, first)
        for first, values in enumerate(np.split(video.values, 3))
    ]
    with torch.no_grad():
        theirs = rows_of_theirs(name, model, encoder, [video])
        assert distance(torch.cat([encoder([one]) for one in parts]), theirs) < 1e-5
    if name == "qwen2.5-vl":  # Qwen3-VL's are separate grids
        of_parts = row_positions([5, *map(encoder.grid, parts), 4])
        assert np.array_equal(of_parts, row_positions([5, encoder.grid(video), 4]))


@pytest.mark.parametrize("name", MODELS)
def test_rows_in_bfloat16(name):
    """As near to those of float32 as transformers' are, within a half."""
    model = hugging_face(name)
    encoder = encoder_of(name, model)
    items = drawn_patches(encoder, grids_of(name))
    with torch.no_grad():
        expected = encoder(items)
        ours = encoder.to(torch.bfloat16)(items)
        theirs = rows_of_theirs(name, model.to(torch.bfloat16), encoder, items)
    assert ours.dtype == torch.bfloat16
    errors = [(one.float() - expected).norm().item() for one in (ours, theirs)]
    assert errors[0] < 1.5 * errors[1], errors


def gradients_of(name, model):
    """By our names."""
    weights = {id(one): one.grad for one in model.parameters()}
    by_data = {one.data_ptr(): weights[id(one)] for one in model.parameters()}
    return {ours: by_data[tensor.data_ptr()] for ours, tensor in tensors_of(name, model).items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_holds_the_same_tensors(name, tmp_path):
    """Bit for bit, under the names that transformers writes; a missing one is named."""
    model = hugging_face(name)
    model.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]})
    )
    encoder = load_encoder(tmp_path, patches_per_pack=100)
    found, expected = encoder.state_dict(), tensors_of(name, model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[one], expected[one]) for one in found)
    assert encoder.patches_per_pack == 100
    if name == "qwen2-audio":
        assert not encoder.audio_tower.embed_positions.weight.requires_grad
    else:
        assert encoder.pixels.mean == (0.1, 0.2, 0.3)
        assert all(one.requires_grad for one in encoder.parameters())
    tensors = load_file(tmp_path / "model.safetensors")
    gone = next(one for one in tensors if one.startswith(tuple(encoder.prefixes)))
    tensors.pop(gone)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="fetch both"):
        load_encoder(tmp_path)


def test_pixels_are_those_of_the_processors():
    """Bit for bit: of Qwen's behind the copy in time and the cut into patches, of CLIP's whole."""
    data = np.random.default_rng(0).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    picture = Image.fromarray(data)
    processor = Qwen2VLImageProcessorPil(do_resize=False)
    theirs = processor(picture, return_tensors="pt")["pixel_values"]
    cells = data.reshape(2, 2, 14, 3, 2, 14, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    item = Patches(cells.reshape(24, -1), (1, 4, 6))
    encoder = encoder_of("qwen2.5-vl")
    pixels = Pixels(tuple(processor.image_mean), tuple(processor.image_std))
    ours = pixels.of(torch.from_numpy(item.values))
    repeated = ours.reshape(24, 3, 1, -1).expand(-1, -1, 2, -1).reshape(24, -1)
    assert torch.equal(repeated, theirs)
    assert encoder.pixels.mean == pixels.mean and encoder.pixels.std == pixels.std

    clip = CLIPImageProcessorPil(do_resize=False, do_center_crop=False)
    theirs = clip(picture, return_tensors="pt")["pixel_values"][0]
    of_colours = data.transpose(2, 0, 1).reshape(1, -1)
    ours = encoder_of("llava-clip").pixels.of(torch.from_numpy(of_colours))
    assert torch.equal(ours.reshape(theirs.shape), theirs)
    assert torch.equal(pixels.of(theirs), theirs)  # numbers stay


@pytest.mark.parametrize(
    ("name", "values", "grid", "sentence"),
    [
        ("qwen3-vl", 48, (1, 3, 4), "multiples of 2"),
        ("qwen3-vl", 40, (1, 2, 4), "48 or 96, as for 4 x 4 pixels"),
        ("llava-clip", 48, (1, 4, 4), "one size"),
    ],
)
def test_items_that_are_none(name, values, grid, sentence):
    item = Patches(np.zeros((np.prod(grid), values), dtype=np.uint8), grid)
    with pytest.raises(ValueError, match=sentence):
        encoder_of(name).patches(item)


@pytest.mark.parametrize(("shape", "frames"), [((9, 400), 50), ((10, 401), 50), ((10, 400), 2)])
def test_sounds_that_are_none(shape, frames):
    with pytest.raises(ValueError, match="10 bins and at most 400 frames"):
        encoder_of("qwen2-audio").patches(Sound(np.zeros(shape, dtype=np.float32), frames))
    with pytest.raises(ValueError, match="no more of sound"):
        Sound(np.zeros(shape, dtype=np.float32), 500)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vision_config": {"model_type": "vit"}}, "vision tower 'vit'"),
        ({"vision_config": {}, "vision_feature_select_strategy": "full"}, "a row stands for"),
        ({"vision_config": {"hidden_act": "tanh"}}, "activation 'tanh'"),
        ({"vision_config": {"attention_dropout": 0.1}}, "attention_dropout 0.1"),
    ],
)
def test_configurations_that_are_not_known(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        LlavaEncoder({"text_config": {}, **changes})


def test_models_that_are_not_known(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mllama"}')
    with pytest.raises(ValueError, match="model_type 'mllama'"):
        load_encoder(tmp_path)
