"""Pictures among the tokens: bars are drawn, and the text behind a picture tells their heights."""

import sys

import numpy as np
import torch

from megatron_hdp.media import ItemCostModel
from megatron_hdp.session import HdpSession, MediaItem, TokenBatch

PATCH, MERGE, HIDDEN = 8, 2, 64


class Encoder(torch.nn.Module):
    """Patches attend to each other within their picture; 2 x 2 of them become a row."""

    patches_per_row, patches_per_pack = MERGE**2, 1024
    cost = ItemCostModel(patch_s=1e-5, patch2_s=1e-8)  # what decides who encodes what

    def __init__(self) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(PATCH**2, HIDDEN)
        self.layer = torch.nn.TransformerEncoderLayer(HIDDEN, 4, 128, 0.0, batch_first=True)
        self.leave = torch.nn.Linear(HIDDEN * MERGE**2, HIDDEN)

    def patches(self, picture: torch.Tensor) -> int:
        """Of a picture, ``[height, width]`` pixels."""
        return picture.numel() // PATCH**2

    def forward(self, pictures: list[torch.Tensor]) -> torch.Tensor:
        """Rows of pictures, one behind another, ``[rows, hidden]``."""
        return torch.cat([self.rows(one) for one in pictures])

    def rows(self, picture: torch.Tensor) -> torch.Tensor:
        """Of one; the patches of a row are neighbours."""
        side = PATCH * MERGE
        cells = picture.unfold(0, side, side).unfold(1, side, side)
        patches = cells.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)
        found = self.layer(self.enter(patches.reshape(1, -1, PATCH**2)))
        return self.leave(found.reshape(-1, HIDDEN * MERGE**2))


def chart(data: np.random.Generator) -> tuple[torch.Tensor, list[int]]:
    """A picture of any width, and its text: a digit for each bar's height."""
    heights = data.integers(1, 8, data.integers(2, 30))
    picture = torch.zeros(64, 16 * len(heights))
    for i, height in enumerate(heights.tolist()):
        picture[64 - 8 * height :, 16 * i : 16 * i + 12] = 1
    return picture, [*b"heights: ", *(heights + ord("0")).tolist()]


flags = ["--config", "configs/tiny-cpu.yaml", *sys.argv[1:]]
session = HdpSession.from_flags(flags, vocab_size=257)
torch.manual_seed(0)  # alike on all ranks
encoder = Encoder()
session.attach_encoder(encoder)
optimizer = session.build_optimizer()
of_encoder = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
data = np.random.default_rng(seed=0)

for step in range(1, 4):
    pictures, texts = zip(*(chart(data) for _ in range(16)), strict=True)
    rows = [encoder.patches(one) // MERGE**2 for one in pictures]
    tokens = [[0] * count + text for count, text in zip(rows, texts, strict=True)]
    media = [MediaItem(sequence=i, start=0, data=one) for i, one in enumerate(pictures)]
    report = session.step(TokenBatch(tokens, media=media))
    optimizer.step()
    of_encoder.step()
    if session.is_first_rank:
        print(f"step {step}: loss {report.loss:.6f}, {sum(rows)} rows of {len(rows)} pictures")
session.close()
