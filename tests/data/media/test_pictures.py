"""Patches have the bits of the PIL processors of transformers, an eighth of their bytes."""

import io
import random
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from megatron_hdp.data.media import MediaError, patches_of_picture, size_of_picture
from megatron_hdp.media import ENCODERS, Patches
from megatron_hdp.media.encoders import Limits, Resizing
from tests.data.media.drawn import KINDS, TURNED, drawn, saved

TRANSPARENT = {"palette", "alpha", "grey-alpha", "webp-alpha"}
QWEN = Resizing(patch=14, merge=2, frames_per_patch=2, images=Limits(least=3_136, most=40_000))
CROPPED = Resizing(patch=14, merge=1, square=98, is_cropped=True)
STRETCHED = Resizing(patch=16, merge=1, square=100)


def normalised(patches: Patches, processor: Any, patch: int) -> np.ndarray:
    """What an encoder makes of patches, before the temporal copy: ``[patches, 3, p * p]``."""
    scaled = (patches.values.astype(np.float64) * processor.rescale_factor).astype(np.float32)
    by_colour = scaled.reshape(-1, 3, patch * patch).transpose(0, 2, 1)
    mean, std = (np.array(one, np.float32) for one in (processor.image_mean, processor.image_std))
    return ((by_colour - mean) / std).transpose(0, 2, 1)


def cut(pixels: np.ndarray, patch: int) -> np.ndarray:
    """Pixels ``[3, h, w]`` as patches, as a convolution of that size and stride sees them."""
    h, w = (side // patch for side in pixels.shape[1:])
    rows = [
        pixels[:, y * patch : (y + 1) * patch, x * patch : (x + 1) * patch].reshape(3, -1)
        for y in range(h)
        for x in range(w)
    ]
    return np.stack(rows)


def require_equal_bits(raw: bytes, given: Image.Image | str) -> None:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    sides = {"shortest_edge": 3_136, "longest_edge": 40_000}
    qwen = Qwen2VLImageProcessorPil(size=sides)
    expected = qwen(given, return_tensors="np")
    found = patches_of_picture(raw, "a.jpg", QWEN)
    assert list(found.grid) == expected["image_grid_thw"][0].tolist()
    ours = np.repeat(normalised(found, qwen, 14)[:, :, None], 2, axis=2)
    assert np.array_equal(ours.reshape(len(ours), -1), expected["pixel_values"])
    assert found.values.dtype == np.uint8
    assert found.values.nbytes * 8 == expected["pixel_values"].astype(np.float32).nbytes

    clip = CLIPImageProcessorPil(size={"shortest_edge": 98}, crop_size={"height": 98, "width": 98})
    siglip = SiglipImageProcessorPil(size={"height": 100, "width": 100})
    for processor, resizing in ((clip, CROPPED), (siglip, STRETCHED)):
        (pixels,) = processor(given, return_tensors="np")["pixel_values"]
        found = patches_of_picture(raw, "a.jpg", resizing)
        ours = normalised(found, processor, resizing.patch)
        assert np.array_equal(ours, cut(pixels, resizing.patch))


def test_bits_of_processors() -> None:
    for kind, orientation, sides in (("jpeg", 6, (83, 120)), ("alpha", 1, (300, 170))):
        raw = saved(drawn(*sides), kind, orientation)
        require_equal_bits(raw, ImageOps.exif_transpose(Image.open(io.BytesIO(raw))))


@pytest.mark.slow
def test_bits_of_processors_in_all_formats(tmp_path: Any) -> None:
    """Pictures that a processor opens itself lose their transparency, so those are handed over."""
    count = 0
    rng = np.random.default_rng(3)
    for seed in range(40):
        height, width = np.exp(rng.normal(5, 0.6, 2)).astype(int) + 2
        picture = drawn(int(height), int(width), seed)
        for kind in KINDS:
            orientation = int(rng.integers(1, 9)) if kind in TURNED else 1
            raw = saved(picture, kind, orientation)
            path = tmp_path / "picture"
            path.write_bytes(raw)
            opened = ImageOps.exif_transpose(Image.open(io.BytesIO(raw)))
            require_equal_bits(raw, opened if kind in TRANSPARENT else str(path))
            count += 1
    assert count == 600


@pytest.mark.parametrize("name", [one for one in ENCODERS if one != "qwen2-audio"])
@pytest.mark.parametrize("sides", [(30, 400), (1, 1), (224, 224)])
def test_patches_are_those_of_the_header(name: str, sides: tuple[int, int]) -> None:
    raw, resizing = saved(drawn(*sides), "png"), ENCODERS[name].resizing
    size = size_of_picture(io.BytesIO(raw), "a.png")
    patches = patches_of_picture(raw, "a.png", resizing)
    assert resizing.patches(size.height, size.width) == (len(patches.values), 1)
    assert patches.values.shape[1] == 3 * resizing.patch**2


def test_a_damaged_body_is_found_when_it_is_decoded() -> None:
    raw = saved(drawn(300, 410), "jpeg")
    cut_off = raw[: len(raw) // 2]
    assert size_of_picture(io.BytesIO(cut_off), "a.jpg").width == 410
    with pytest.raises(MediaError, match=r"a\.jpg: found a damaged picture .*truncated"):
        patches_of_picture(cut_off, "a.jpg", QWEN)


@pytest.mark.filterwarnings("ignore")
def test_broken_bytes_give_the_patches_of_their_header_or_a_sentence() -> None:
    dice = random.Random(7)
    kinds = [kind for kind in KINDS if kind != "tiff"]  # of which later pages may be broken
    files = [saved(drawn(40, 60, 3), kind, 6 if kind in TURNED else 1) for kind in kinds]
    num_decoded = num_refused = 0
    for _ in range(400):
        broken = bytearray(dice.choice(files))
        for _ in range(dice.randrange(1, 4)):
            broken[dice.randrange(min(len(broken), dice.choice([64, 10**6])))] = dice.randrange(256)
        try:
            found = patches_of_picture(bytes(broken), "a.jpg", QWEN, most_pixels=2**20)
        except MediaError as error:
            num_refused += 1
            assert str(error).startswith("a.jpg: found ")
            continue
        num_decoded += 1
        size = size_of_picture(io.BytesIO(broken), "a.jpg")
        assert QWEN.patches(size.height, size.width)[0] == len(found.values)
    assert num_decoded > 20 and num_refused > 20
