"""Qwen2-Audio's encoder: Whisper's layers over a window of sound, pairs of which become a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as functional

from megatron_hdp.encoders.base import EncoderSettings, ItemEncoder
from megatron_hdp.encoders.blocks import Blocks
from megatron_hdp.encoders.layers import activation_of
from megatron_hdp.media import PATCHES_PER_PACK, Encoder, RowGrid, Sound, Windows

_TAPS = 3  # of both convolutions


@dataclass(frozen=True, kw_only=True)
class _Settings(EncoderSettings):
    num_mel_bins: int = 128
    encoder_layers: int = 32
    encoder_attention_heads: int = 20
    encoder_ffn_dim: int = 5120
    d_model: int = 1280
    activation_function: str = "gelu"
    max_source_positions: int = 1500


class _Attention(torch.nn.Module):
    def __init__(self, settings: _Settings) -> None:
        super().__init__()
        hidden = settings.d_model
        self._heads = settings.encoder_attention_heads
        self.k_proj = torch.nn.Linear(hidden, hidden, bias=False)
        self.v_proj = torch.nn.Linear(hidden, hidden)
        self.q_proj = torch.nn.Linear(hidden, hidden)
        self.out_proj = torch.nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        query, key, value = (
            matrix(x).unflatten(-1, (self._heads, -1))
            for matrix in (self.q_proj, self.k_proj, self.v_proj)
        )
        out: torch.Tensor = self.out_proj(blocks.attend(query, key, value))
        return out


class _Layer(torch.nn.Module):
    def __init__(self, settings: _Settings) -> None:
        super().__init__()
        hidden, inner = settings.d_model, settings.encoder_ffn_dim
        self.self_attn_layer_norm = torch.nn.LayerNorm(hidden)
        self.self_attn = _Attention(settings)
        self.final_layer_norm = torch.nn.LayerNorm(hidden)
        self.fc1 = torch.nn.Linear(hidden, inner)
        self.fc2 = torch.nn.Linear(inner, hidden)
        self._activation = activation_of(settings.activation_function)

    def forward(self, x: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), blocks)
        inner = self._activation(self.fc1(self.final_layer_norm(x)))
        out: torch.Tensor = x + self.fc2(inner)
        return out


class _Tower(torch.nn.Module):
    def __init__(self, settings: _Settings, windows: Windows) -> None:
        super().__init__()
        self._windows, hidden = windows, settings.d_model
        self.conv1 = torch.nn.Conv1d(settings.num_mel_bins, hidden, kernel_size=_TAPS, padding=1)
        self.conv2 = torch.nn.Conv1d(
            hidden, hidden, kernel_size=_TAPS, stride=windows.stride, padding=1
        )
        self.embed_positions = torch.nn.Embedding(settings.max_source_positions, hidden)
        self.embed_positions.requires_grad_(False)  # sines
        self.layers = torch.nn.ModuleList(_Layer(settings) for _ in range(settings.encoder_layers))
        self.layer_norm = torch.nn.LayerNorm(hidden)

    def forward(self, windows: Sequence[torch.Tensor], frames: Sequence[int]) -> torch.Tensor:
        """Pooled states of windows ``[bins, n]``, of each the first frames."""
        x = torch.cat(
            [self._frames(one, count) for one, count in zip(windows, frames, strict=True)]
        )
        blocks = Blocks(frames, x.device)
        for layer in self.layers:
            x = layer(x, blocks)
        size = self._windows.pooled
        pooled = [
            one[: len(one) // size * size].unflatten(0, (-1, size)).mean(1)
            for one in x.split(list(frames))
        ]
        out: torch.Tensor = self.layer_norm(torch.cat(pooled))
        return out

    def _frames(self, window: torch.Tensor, count: int) -> torch.Tensor:
        """States of a window, ``[count, hidden]``; no frame is read that none of them sees."""
        seen = window[None, :, : self._windows.stride * count + 1]
        x = functional.gelu(self.conv2(functional.gelu(self.conv1(seen))))
        return x[0].T[:count] + self.embed_positions.weight[:count]


class _Projector(torch.nn.Module):
    def __init__(self, hidden: int, row_hidden: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(hidden, row_hidden)


class Qwen2AudioEncoder(ItemEncoder):
    """What ``audio_tower`` and ``multi_modal_projector`` are in Qwen2-Audio.

    Its items are `Sound`; their frames behind the convolutions count as patches.
    """

    prefixes: ClassVar[Mapping[str, str]] = {
        "model.audio_tower.": "audio_tower.",
        "audio_tower.": "audio_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "multi_modal_projector.": "multi_modal_projector.",
    }
    projectors = ("multi_modal_projector.",)

    def __init__(self, config: Mapping[str, Any], patches_per_pack: int = PATCHES_PER_PACK) -> None:
        super().__init__(config, patches_per_pack)
        self._settings = settings = _Settings.of(config["audio_config"])
        row_hidden = config["text_config"].get("hidden_size", 4096)
        most_frames = Windows.stride * settings.max_source_positions
        self._windows = windows = Windows(most_frames=most_frames)
        self.shape = Encoder(
            resizing=windows,
            layers=settings.encoder_layers,
            hidden=settings.d_model,
            ffn=settings.encoder_ffn_dim,
            values=_TAPS * (windows.stride * settings.num_mel_bins + settings.d_model),
            pooled=windows.pooled,
            projector_hidden=0,
            projector_norm=False,
            row_hidden=row_hidden,
        )
        self.audio_tower = _Tower(settings, windows)
        self.multi_modal_projector = _Projector(settings.d_model, row_hidden)

    def samples(self) -> list[Any]:
        """Sounds of 0.2 s to the longest."""
        most = self._windows.most_frames
        shape = self._settings.num_mel_bins, most
        lengths = [*(20 * 4**i for i in range(4)), most]
        return [Sound(np.zeros(shape, dtype=np.float32), one) for one in lengths if one <= most]

    def patches(self, item: Sound) -> int:
        """Frames of an item that become rows.

        Raises:
            ValueError: it is no sound, has other bins, is too long, or too short for a row.
        """
        self._require_kind(item, "num_frames", "a sound")
        settings, (bins, frames) = self._settings, item.values.shape
        most = self._windows.most_frames
        if bins != settings.num_mel_bins or frames > most or self.grid(item).w < 1:
            raise ValueError(
                f"found a window of {bins} bins and {frames} frames, {item.num_frames} of sound, "
                f"expected {settings.num_mel_bins} bins and at most {most} frames, of which 3 or "
                "more hold sound: cut sound into windows by the model's feature extractor"
            )
        return self.grid(item).w * self._windows.pooled

    def grid(self, item: Sound) -> RowGrid:
        """An item's rows, one behind another."""
        return RowGrid(1, 1, self._states(item) // self._windows.pooled)

    def forward(self, items: Sequence[Sound]) -> torch.Tensor:
        """Rows of items, one behind another, ``[rows, hidden]``."""
        weight = self.audio_tower.conv1.weight
        windows = [
            torch.from_numpy(np.asarray(one.values)).to(weight.device, weight.dtype)
            for one in items
        ]
        states = self.audio_tower(windows, [self._states(one) for one in items])
        rows: torch.Tensor = self.multi_modal_projector.linear(states)
        return rows

    def _states(self, item: Sound) -> int:
        """Frames behind the convolutions."""
        return int(self._windows.states(np.array([item.num_frames]))[0])
