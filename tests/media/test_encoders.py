"""Patches of pictures are those of the models' own processors."""

import random

import numpy as np
import pytest

from megatron_hdp.media import ENCODERS
from megatron_hdp.media.encoders import Limits, Resizing

QWEN3, QWEN2 = ENCODERS["qwen3-vl"].resizing, ENCODERS["qwen2.5-vl"].resizing


@pytest.mark.parametrize(
    ("size", "qwen3", "qwen2"),
    [
        ((224, 224), (256, 1), (256, 1)),  # qwen3: no fewer pixels than 256 x 256
        ((1024, 1024), (4096, 1), (5476, 1)),
        ((2160, 3840), (32_640, 1), (42_196, 1)),
        ((100, 3000), (1128, 1), (1712, 1)),
        ((31, 33), (288, 1), (24, 1)),
        ((720, 1280, 64), (1456, 32), (2880, 32)),
    ],
)
def test_what_transformers_has(size, qwen3, qwen2):
    """Of `smart_resize`, release 5.24; the next test asks the release that is installed."""
    assert QWEN3.patches(*size) == qwen3
    assert QWEN2.patches(*size) == qwen2


@pytest.mark.slow
def test_ten_thousand_sizes_against_transformers():
    """Integer-equal, refusals too; images and videos."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as of_video

    def patches(rules: Resizing, limits: Limits, height: int, width: int) -> int:
        unit = rules.patch * rules.merge
        sides = smart_resize(height, width, unit, min_pixels=limits.least, max_pixels=limits.most)
        return sides[0] * sides[1] // rules.patch**2

    def qwen3_video(height: int, width: int, frames: int) -> int:
        limits = QWEN3.videos
        sides = of_video(frames, height, width, 2, 32, limits.least, limits.most)
        return sides[0] * sides[1] // 16**2

    def result(function, *args):
        try:
            found = function(*args)
        except ValueError:
            return "refused"
        return found[0] if isinstance(found, tuple) else found

    drawn = random.Random(7)
    for _ in range(10_000):
        size = tuple(int(2 ** drawn.uniform(0, 13)) for _ in range(2))
        frames = drawn.randint(2, 300)
        for rules in (QWEN3, QWEN2):
            theirs = result(patches, rules, rules.images, *size)
            assert result(rules.patches, *size) == theirs, size
        assert result(QWEN2.patches, *size, frames) == result(patches, QWEN2, QWEN2.videos, *size)
        assert result(QWEN3.patches, *size, frames) == result(qwen3_video, *size, frames)


def test_a_square_encoder_takes_every_picture_as_one_size():
    """CLIP and SigLIP."""
    assert ENCODERS["clip-l-336"].resizing.patches(10, 4000) == (576, 1)
    assert ENCODERS["siglip-so400m-384"].resizing.patches(999, 7, 3) == (729, 3)


@pytest.mark.parametrize(
    ("size", "why"),
    [
        ((0, 5), "found 0 x 5 pixels"),
        ((5, 5, 0), "0 frames"),
        ((10, 2001), "one side at most 200 times"),
    ],
)
def test_sizes_that_are_none(size, why):
    """Said as found and expected."""
    with pytest.raises(ValueError, match=why):
        QWEN3.patches(*size)


def test_flop_of_a_picture():
    """Qwen3-VL's encoder on one megapixel, forward: counted by hand from its shapes."""
    linear, quadratic = ENCODERS["qwen3-vl"].flop()
    layers = 27 * 2 * (4 * 1152**2 + 2 * 1152 * 4304)
    mergers = 4 * 2 * (4608 * 4608 + 4608 * 4096) / 4
    assert linear == pytest.approx(2 * 1536 * 1152 + layers + mergers)
    assert quadratic == 4 * 27 * 1152


def test_only_layers_without_windows_grow_with_the_square():
    """Four of Qwen2.5-VL's 32; the others attend to 64 patches."""
    encoder = ENCODERS["qwen2.5-vl"]
    linear, quadratic = encoder.flop()
    assert quadratic == 4 * 4 * 1280
    matrices = 32 * 2 * (4 * 1280**2 + 3 * 1280 * 3420)
    projector = 2 * (5120 * 5120 + 5120 * 4096) / 4
    patches = 2 * 1176 * 1280
    assert linear == pytest.approx(patches + matrices + projector + 28 * 4 * 1280 * 64)


@pytest.mark.parametrize(("tower", "projector"), [(1, 1), (1, 0), (0, 1), (0, 0)])
def test_flop_of_what_is_trained(tower, projector):
    """Once forward, twice backward, but for pixels and what comes before all that is trained."""
    encoder = ENCODERS["qwen3-vl"]
    linear, quadratic = encoder.flop()
    of_projector = 4 * 2 * (4608 * 4608 + 4608 * 4096) / 4
    patches = np.array([256, 1024])
    squares = int((patches**2).sum())
    of_tower = (linear - of_projector) * 1280 + quadratic * squares
    expected = of_tower + of_projector * 1280
    if tower:
        expected += 2 * of_tower - 2 * 1536 * 1152 * 1280 + of_projector * 1280
    if projector:
        expected += (1 if tower else 2) * of_projector * 1280
    found = encoder.training_flop(patches, tower=bool(tower), projector=bool(projector))
    assert found == pytest.approx(expected)
