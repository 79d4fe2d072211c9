"""Encoders of families of models in float64, items for them, and what they do to a language model.

The reference knows nothing of marks, exchanges or tables of axes: rows are added as dense arrays,
and positions are counted token by token.
"""

import torch

from tests.support.own_loop import HIDDEN
from tests.support.vision_models import MODELS

PROJECTORS = ("merger", "deepstack_merger_list", "multi_modal_projector")
FREQUENCIES = 6
AXES_OF = {"qwen2.5-vl": [0, 1, 1, 2, 2, 2], "qwen3-vl": [0, 1, 2, 0, 1, 2]}
_ROPE = {
    "qwen2.5-vl": {"mrope_section": [1, 2, 3]},
    "qwen3-vl": {"mrope_section": [2, 2, 2]},
}
_QWEN_ITEMS = [(2, 0), (3, 10), (3, 60), (4, 63), (5, 5), (7, 1), (7, 120)]
ITEMS_OF = {
    "qwen2.5-vl": _QWEN_ITEMS,
    "qwen3-vl": _QWEN_ITEMS,
    "llava-clip": [(3, 0), (5, 20), (7, 50), (7, 120), (8, 93)],
    "qwen2-audio": [(3, 0), (5, 20), (7, 50), (7, 150), (8, 93)],
}
"""Sequence and first token of each: at a sequence's begin and end, over chunks of a ring."""
_QWEN_GRIDS = [(1, 4, 2), (3, 4, 12), (1, 2, 2), (1, 2, 2), (1, 10, 10), (1, 12, 26), (1, 4, 80)]
GRIDS_OF = {
    "qwen2.5-vl": _QWEN_GRIDS,
    "qwen3-vl": _QWEN_GRIDS,
    "llava-clip": [(1, 6, 6)] * 5,
    "qwen2-audio": [100, 7, 400, 50, 51],
}


def family_encoder(family):
    """An encoder whose rows are as wide as the tiny model's hidden states."""
    _, kind, config = MODELS[family]
    vision = config.get("vision_config", {}) | {"out_hidden_size": HIDDEN}
    if family == "qwen3-vl":
        vision["deepstack_visual_indexes"] = [0, 2]
    rope = {"rope_parameters": _ROPE.get(family, {})}
    text = config["text_config"] | {"hidden_size": HIDDEN} | rope
    encoder = kind(config | {"text_config": text, "vision_config": vision}, patches_per_pack=400)
    generator = torch.Generator().manual_seed(5)
    encoder.double().requires_grad_()  # what is frozen is chosen by tests
    for weight in encoder.parameters():
        drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        weight.data.copy_(drawn / max(1, weight[0].numel()) ** 0.5)
    return encoder


class Levels:
    """Adds the rows of further levels behind the first layers of a model."""

    def __init__(self, gpt, levels):
        self._levels = levels
        self._added = []
        for number in range(levels - 1):
            gpt.decoder.layers[number].register_forward_hook(
                lambda _, given, found, number=number: (found[0] + self._added[number], *found[1:])
            )

    def begin(self, length):
        """A sequence without rows."""
        self._added = [torch.zeros(length, 1, HIDDEN).double() for _ in range(self._levels - 1)]

    def of(self, rows, start):
        """The first level of an item's rows; the others are added behind layers."""
        first, *others = rows.chunk(self._levels, dim=1)
        for number, level in enumerate(others):
            length = len(self._added[number])
            behind = length - start - len(level)
            padded = torch.nn.functional.pad(level[:, None], (0, 0, 0, 0, start, behind))
            self._added[number] = self._added[number] + padded
        return first


def turn(gpt, encoder, length, items):
    """Makes a model turn by positions on three axes, counted token by token."""
    family = "qwen3-vl" if encoder.positions.is_interleaved else "qwen2.5-vl"
    starts = {one.start: one.data for one in items}
    found, following = [], 0
    while len(found) < length:
        item = starts.get(len(found))
        if item is None:
            found.append((following,) * 3)
            following += 1
            continue
        t, h, w = item.grid[0], item.grid[1] // 2, item.grid[2] // 2
        for frame in range(t):
            for line in range(h):
                for column in range(w):
                    found.append((following + frame, following + line, following + column))
        following += max(h, w)
    frequencies = gpt.rotary_pos_emb.inv_freq
    positions = torch.tensor(found).to(frequencies.dtype)
    angles = torch.stack(
        [positions[:, axis] * frequencies[i] for i, axis in enumerate(AXES_OF[family])], dim=1
    )
    turned = torch.cat([angles, angles], dim=1)[:, None, None]
    gpt.rotary_pos_emb.forward = lambda *given, **settings: turned
