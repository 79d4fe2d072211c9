"""Qwen3-VL's encoder: learnt positions on any grid, and rows of several levels (deepstack)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from megatron_hdp.encoders.base import (
    CHANNELS,
    HALF_PIXELS,
    CutEncoder,
    EncoderSettings,
    Pixels,
    mrope_of,
)
from megatron_hdp.encoders.blocks import (
    Blocks,
    CutBlock,
    Gather,
    Grid,
    Rotation,
    frames_of,
    places_of,
    wide,
)
from megatron_hdp.encoders.layers import PatchEmbedding, RotaryLayer, activation_of
from megatron_hdp.media import ENCODERS, PATCHES_PER_PACK, Encoder

_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class _Settings(EncoderSettings):
    depth: int = 27
    hidden_size: int = 1152
    hidden_act: str = "gelu_pytorch_tanh"
    intermediate_size: int = 4304
    num_heads: int = 16
    patch_size: int = 16
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    out_hidden_size: int = 3584
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: Sequence[int] = (8, 16, 24)


class _Mlp(torch.nn.Module):
    def __init__(self, settings: _Settings) -> None:
        super().__init__()
        self.linear_fc1 = torch.nn.Linear(settings.hidden_size, settings.intermediate_size)
        self.linear_fc2 = torch.nn.Linear(settings.intermediate_size, settings.hidden_size)
        self._activation = activation_of(settings.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear_fc2(self._activation(self.linear_fc1(x)))
        return out


def _layer(settings: _Settings) -> RotaryLayer:
    norms = [torch.nn.LayerNorm(settings.hidden_size, eps=_EPSILON) for _ in range(2)]
    return RotaryLayer(settings.hidden_size, settings.num_heads, norms, _Mlp(settings))


class _Merger(torch.nn.Module):
    """A row of neighbouring patches; normalised one by one, or as a row."""

    def __init__(self, settings: _Settings, *, of_rows: bool) -> None:
        super().__init__()
        self._merged = merged = settings.hidden_size * settings.spatial_merge_size**2
        self.norm = torch.nn.LayerNorm(merged if of_rows else settings.hidden_size, eps=_EPSILON)
        self.linear_fc1 = torch.nn.Linear(merged, merged)
        self.linear_fc2 = torch.nn.Linear(merged, settings.out_hidden_size)
        self._of_rows = of_rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x.view(-1, self._merged) if self._of_rows else x).view(-1, self._merged)
        out: torch.Tensor = self.linear_fc2(torch.nn.functional.gelu(self.linear_fc1(rows)))
        return out


class Qwen3VLEncoder(CutEncoder):
    """What ``model.visual`` is in Qwen3-VL, dense or of experts."""

    prefixes: ClassVar[Mapping[str, str]] = {"model.visual.": "", "visual.": ""}
    projectors = ("merger.", "deepstack_merger_list.")

    def __init__(
        self,
        config: Mapping[str, Any],
        pixels: Pixels | None = None,
        patches_per_pack: int = PATCHES_PER_PACK,
    ) -> None:
        super().__init__(config, pixels, patches_per_pack)
        self._settings = settings = _Settings.of(config["vision_config"])
        self.positions = mrope_of(config, (24, 20, 20), is_interleaved=True)
        self.levels = 1 + len(settings.deepstack_visual_indexes)
        self.shape = Encoder(
            resizing=replace(
                ENCODERS["qwen3-vl"].resizing,
                patch=settings.patch_size,
                merge=settings.spatial_merge_size,
                frames_per_patch=settings.temporal_patch_size,
            ),
            layers=settings.depth,
            hidden=settings.hidden_size,
            ffn=settings.intermediate_size,
            values=CHANNELS * settings.temporal_patch_size * settings.patch_size**2,
            projectors=self.levels,
            row_hidden=settings.out_hidden_size,
        )
        frames = settings.temporal_patch_size
        self.patch_embed = PatchEmbedding(
            settings.hidden_size,
            CHANNELS,
            frames,
            settings.patch_size,
            settings.patch_size,
            bias=True,
        )
        self.pos_embed = torch.nn.Embedding(settings.num_position_embeddings, settings.hidden_size)
        self.blocks = torch.nn.ModuleList(_layer(settings) for _ in range(settings.depth))
        self.merger = _Merger(settings, of_rows=False)
        self.deepstack_merger_list = torch.nn.ModuleList(
            _Merger(settings, of_rows=True) for _ in settings.deepstack_visual_indexes
        )

    @staticmethod
    def usual_pixels(config: Mapping[str, Any]) -> Pixels:
        """Every colour from -1 to 1."""
        return HALF_PIXELS

    def encoded(self, patches: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Rows, ``[rows, levels * hidden]``: those of the embedding first."""
        places = places_of(grids, self._settings.spatial_merge_size)
        counts = torch.tensor([t * h * w for t, h, w in grids])
        sizes = torch.tensor([one[1:] for one in grids]).T.repeat_interleave(counts, dim=1)
        return self._rows(patches, places, sizes, Blocks(frames_of(grids), patches.device))

    def _encoded_piece(
        self, patches: torch.Tensor, grid: Grid, rows: torch.Tensor, gather: Gather
    ) -> torch.Tensor:
        merge = self._settings.spatial_merge_size
        places = places_of([grid], merge).unflatten(1, (-1, merge**2))[:, rows].flatten(1)
        return self._rows(patches, places, torch.tensor(grid[1:])[:, None], CutBlock(gather))

    def _rows(
        self,
        patches: torch.Tensor,
        places: torch.Tensor,
        sizes: torch.Tensor,
        blocks: Blocks | CutBlock,
    ) -> torch.Tensor:
        """Of patches at these places of grids of these heights and widths, ``[2, n]`` each."""
        settings = self._settings
        x = self.patch_embed.proj(patches)
        x = x + self._learnt_positions(places, sizes).to(x.dtype)
        turned = Rotation(places, settings.hidden_size // settings.num_heads, 1e4, x)
        further = dict(
            zip(settings.deepstack_visual_indexes, self.deepstack_merger_list, strict=True)
        )
        levels = []
        for number, layer in enumerate(self.blocks):
            x = layer(x, blocks, turned)
            if number in further:
                levels.append(further[number](x))
        return torch.cat([self.merger(x), *levels], dim=1)

    def _learnt_positions(self, places: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """Between the four neighbours in the learnt square, whose corners are the picture's."""
        table = self.pos_embed.weight
        side = round(len(table) ** 0.5)
        at = places.float() * (side - 1) / (sizes - 1).clamp(min=1)  # [2, n]
        below = at.floor()
        share, below = at - below, below.long()
        found = torch.zeros((), dtype=wide(table.dtype), device=table.device)
        for down in (0, 1):
            for right in (0, 1):
                near = (below + torch.tensor([[down], [right]])).clamp(max=side - 1)
                weights = (share if one else 1 - share for one in (down, right))
                weight = [w[axis] for axis, w in enumerate(weights)]
                factor = (weight[0] * weight[1]).to(found.device, found.dtype)
                index = (near[0] * side + near[1]).to(table.device)
                found = found + table[index] * factor[:, None]
        return found
