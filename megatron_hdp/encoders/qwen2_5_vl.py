"""Qwen2.5-VL's encoder: windows of 112 pixels in most layers, whole images in a few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from megatron_hdp.arrays import Int64Array
from megatron_hdp.encoders.base import (
    CHANNELS,
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
)
from megatron_hdp.encoders.layers import (
    PatchEmbedding,
    RmsNorm,
    RotaryLayer,
    activation_of,
)
from megatron_hdp.media import ENCODERS, PATCHES_PER_PACK, Encoder, Patches, RowGrid


@dataclass(frozen=True, kw_only=True)
class _Settings(EncoderSettings):
    depth: int = 32
    hidden_size: int = 3584
    hidden_act: str = "silu"
    intermediate_size: int = 3420
    num_heads: int = 16
    patch_size: int = 14
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    tokens_per_second: float = 4
    window_size: int = 112
    out_hidden_size: int = 3584
    fullatt_block_indexes: Sequence[int] = (7, 15, 23, 31)


class _Mlp(torch.nn.Module):
    def __init__(self, settings: _Settings) -> None:
        super().__init__()
        hidden, inner = settings.hidden_size, settings.intermediate_size
        self.gate_proj = torch.nn.Linear(hidden, inner)
        self.up_proj = torch.nn.Linear(hidden, inner)
        self.down_proj = torch.nn.Linear(inner, hidden)
        self._activation = activation_of(settings.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))
        return out


def _layer(settings: _Settings) -> RotaryLayer:
    norms = [RmsNorm(settings.hidden_size) for _ in range(2)]
    return RotaryLayer(settings.hidden_size, settings.num_heads, norms, _Mlp(settings))


class _Merger(torch.nn.Module):
    def __init__(self, settings: _Settings) -> None:
        super().__init__()
        merged = settings.hidden_size * settings.spatial_merge_size**2
        self.ln_q = RmsNorm(settings.hidden_size)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(merged, merged),
            torch.nn.GELU(),
            torch.nn.Linear(merged, settings.out_hidden_size),
        )
        self._merged = merged

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(self.ln_q(x).view(-1, self._merged))
        return out


class Qwen25VLEncoder(CutEncoder):
    """What ``model.visual`` is in Qwen2.5-VL."""

    prefixes: ClassVar[Mapping[str, str]] = {"model.visual.": "", "visual.": ""}
    projectors = ("merger.",)

    def __init__(
        self,
        config: Mapping[str, Any],
        pixels: Pixels | None = None,
        patches_per_pack: int = PATCHES_PER_PACK,
    ) -> None:
        super().__init__(config, pixels, patches_per_pack)
        self._settings = settings = _Settings.of(config["vision_config"])
        self.positions = mrope_of(config, (16, 24, 24), is_interleaved=False)
        patch, merge = settings.patch_size, settings.spatial_merge_size
        self._window = settings.window_size // merge // patch
        self.shape = Encoder(
            resizing=replace(
                ENCODERS["qwen2.5-vl"].resizing,
                patch=patch,
                merge=merge,
                frames_per_patch=settings.temporal_patch_size,
            ),
            layers=settings.depth,
            hidden=settings.hidden_size,
            ffn=settings.intermediate_size,
            gated=True,
            is_rms=True,
            activations=4,
            global_layers=len(settings.fullatt_block_indexes),
            window_patches=(self._window * merge) ** 2,
            values=CHANNELS * settings.temporal_patch_size * patch**2,
            row_hidden=settings.out_hidden_size,
        )
        frames = settings.temporal_patch_size
        self.patch_embed = PatchEmbedding(
            settings.hidden_size,
            CHANNELS,
            frames,
            settings.patch_size,
            settings.patch_size,
            bias=False,
        )
        self.blocks = torch.nn.ModuleList(_layer(settings) for _ in range(settings.depth))
        self.merger = _Merger(settings)

    def grid(self, item: Patches) -> RowGrid:
        """An item's rows; those of a video are as far apart in time as its frames."""
        found = super().grid(item)
        if item.seconds is None:
            return found
        step = self._settings.tokens_per_second * item.seconds
        return RowGrid(found.t, found.h, found.w, step, item.first)

    def encoded(self, patches: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Rows, ``[rows, hidden]``."""
        order, windows = _windows_of(grids, self._settings.spatial_merge_size, self._window)
        there, back = order.to(patches.device), order.argsort().to(patches.device)
        in_windows = patches.unflatten(0, (-1, self.patches_per_row))[there].flatten(0, 1)
        whole = Blocks(frames_of(grids), patches.device)
        return self._rows(in_windows, grids, order, windows, whole)[back]

    def rows_of_pieces(self, item: Patches, degree: int) -> list[Int64Array]:
        """The rows of each member: whole windows, one behind another."""
        order, windows = self._windows(item.grid)
        ends = np.cumsum(windows)
        at = [np.searchsorted(ends, ends[-1] * n / degree) for n in range(1, degree)]
        return np.split(order.numpy(), [0 if i == 0 else ends[i - 1] for i in at])

    def _encoded_piece(
        self, patches: torch.Tensor, grid: Grid, rows: torch.Tensor, gather: Gather
    ) -> torch.Tensor:
        order, windows = self._windows(grid)
        first = int((order == rows[0]).nonzero()) if len(rows) else 0
        ends = np.cumsum(windows)
        mine = [n for n, end in zip(windows, ends, strict=True) if first < end <= first + len(rows)]
        return self._rows(patches, [grid], rows, mine, CutBlock(gather))

    def _windows(self, grid: Grid) -> tuple[torch.Tensor, list[int]]:
        return _windows_of([grid], self._settings.spatial_merge_size, self._window)

    def _rows(
        self,
        patches: torch.Tensor,
        grids: Sequence[Grid],
        order: torch.Tensor,
        windows: Sequence[int],
        whole: Blocks | CutBlock,
    ) -> torch.Tensor:
        """The rows of `order`, window by window, of their patches."""
        settings, merge = self._settings, self._settings.spatial_merge_size
        near = Blocks([merge**2 * rows for rows in windows], patches.device)
        places = places_of(grids, merge).unflatten(1, (-1, merge**2))[:, order].flatten(1)
        x = self.patch_embed.proj(patches)
        turned = Rotation(places, settings.hidden_size // settings.num_heads, 1e4, x)
        for number, layer in enumerate(self.blocks):
            is_whole = number in settings.fullatt_block_indexes
            x = layer(x, whole if is_whole else near, turned)
        rows: torch.Tensor = self.merger(x)
        return rows


def _windows_of(grids: Sequence[Grid], merge: int, window: int) -> tuple[torch.Tensor, list[int]]:
    """Rows in the order of their windows, frame after frame, ``[rows]``; rows of each window."""
    orders, counts, before = [], [], 0
    for t, h, w in grids:
        lines, columns = h // merge, w // merge
        down, across = -(-lines // window), -(-columns // window)
        line = torch.arange(lines)[:, None] // window
        number = (line * across + torch.arange(columns) // window).flatten()
        of_frame, sizes = number.argsort(stable=True), number.bincount(minlength=down * across)
        for _ in range(t):
            orders.append(before + of_frame)
            counts += sizes.tolist()
            before += lines * columns
    return torch.cat(orders), counts
