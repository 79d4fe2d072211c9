"""Positions of rows are those of transformers, integer for integer."""

import numpy as np
import pytest
import torch

from megatron_hdp.media import MRope, RowGrid, row_positions
from tests.support.vision_models import MODELS, hugging_face


def drawn(generator, name):
    """Runs of a random sequence, neighbouring items among them, and what transformers is given."""
    runs, kinds, images, videos, seconds = [], [], [], [], []
    for _ in range(generator.integers(1, 8)):
        kind = int(generator.integers(0, 3))
        if kind and kinds and kinds[-1] == kind:
            kind = 0
        if not kind:
            runs.append(int(generator.integers(1, 30)))
            kinds += [0] * runs[-1]
            continue
        t, h, w = (int(one) for one in generator.integers(1, 7, 3))
        is_qwen_3, is_video = name == "qwen3-vl", kind == 2
        t = t if is_video and not is_qwen_3 else 1
        second = float(generator.choice([0.4, 0.5, 1.0, 1.7])) if is_video else None
        step = 1.0 if second is None or is_qwen_3 else 4 * second
        grid = RowGrid(t, h, w, step)
        is_cut = is_video and generator.integers(2)  # into items that follow each other
        runs += [RowGrid(1, h, w, step, first) for first in range(t)] if is_cut else [grid]
        kinds += [kind] * grid.num_rows
        (videos if is_video else images).append([t, 2 * h, 2 * w])
        if is_video:
            seconds.append(second)
    return runs, kinds, images, videos, seconds


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
def test_a_thousand_layouts(name):
    model, generator = hugging_face(name).model, np.random.default_rng(0)
    for _ in range(1000):
        runs, kinds, images, videos, seconds = drawn(generator, name)
        given = {
            "image_grid_thw": torch.tensor(images) if images else None,
            "video_grid_thw": torch.tensor(videos) if videos else None,
        }
        if name == "qwen2.5-vl" and videos:
            given["second_per_grid_ts"] = torch.tensor(seconds)
        ids = torch.zeros(1, len(kinds), dtype=torch.long)
        expected, _ = model.get_rope_index(ids, torch.tensor([kinds]), **given)
        assert np.array_equal(row_positions(runs), expected[:, 0].numpy())


@pytest.mark.parametrize(
    ("name", "mrope"),
    [("qwen2.5-vl", MRope((1, 1, 2))), ("qwen3-vl", MRope((2, 2, 2), is_interleaved=True))],
)
def test_angles_of_each_axis(name, mrope):
    """Frequencies turn by the axes by which those of transformers do."""
    assert MODELS[name]
    rotary = hugging_face(name).model.language_model.rotary_emb
    positions = torch.tensor([[3, 5], [7, 11], [13, 17]])
    cos, _ = rotary(torch.zeros(1), positions[:, None])
    angles = positions[torch.from_numpy(mrope.axes())].T * rotary.inv_freq
    mine = angles.cos().repeat(1, 2)
    if cos.shape[0] == 3:  # Qwen2.5 chooses axes when it turns
        doubled = cos.split(mrope.sections * 2, dim=-1)
        cos = torch.cat([one[i % 3] for i, one in enumerate(doubled)], dim=-1)
    assert torch.equal(mine, cos.reshape(mine.shape))


@pytest.mark.parametrize(
    "mrope", [((1, 2), False), ((-1, 2, 3), False), ((1, 4, 1), True), ((0, 0, 3), True)]
)
def test_sections_that_are_none(mrope):
    with pytest.raises(ValueError, match="sections"):
        MRope(*mrope)
