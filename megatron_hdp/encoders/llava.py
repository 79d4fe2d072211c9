"""LLaVA's encoders: the tower of CLIP or SigLIP on pictures of one size, and a projector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from megatron_hdp.encoders.base import (
    CHANNELS,
    CLIP_PIXELS,
    HALF_PIXELS,
    EncoderSettings,
    PatchEncoder,
    Pixels,
)
from megatron_hdp.encoders.blocks import Grid
from megatron_hdp.encoders.layers import PatchProjection, activation_of
from megatron_hdp.media import PATCHES_PER_PACK, Encoder, Patches, Resizing


@dataclass(frozen=True, kw_only=True)
class _Clip(EncoderSettings):
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    image_size: int = 224
    patch_size: int = 32
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    is_clip: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class _Siglip(_Clip):
    patch_size: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    vision_use_head: bool = True
    is_clip: ClassVar[bool] = False


_TOWERS: dict[str, tuple[type[_Clip], Pixels]] = {
    "clip_vision_model": (_Clip, CLIP_PIXELS),
    "siglip_vision_model": (_Siglip, HALF_PIXELS),
}

_USUAL = "clip_vision_model"
_LLAMA = 4096  # hidden size, which older files leave out


class _Attention(torch.nn.Module):
    def __init__(self, settings: _Clip) -> None:
        super().__init__()
        hidden = settings.hidden_size
        self._heads = settings.num_attention_heads
        self.k_proj = torch.nn.Linear(hidden, hidden)
        self.v_proj = torch.nn.Linear(hidden, hidden)
        self.q_proj = torch.nn.Linear(hidden, hidden)
        self.out_proj = torch.nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            matrix(x).unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for matrix in (self.q_proj, self.k_proj, self.v_proj)
        )
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        out: torch.Tensor = self.out_proj(found.transpose(1, 2).flatten(2))
        return out


class _Mlp(torch.nn.Module):
    def __init__(self, settings: _Clip) -> None:
        super().__init__()
        self.fc1 = torch.nn.Linear(settings.hidden_size, settings.intermediate_size)
        self.fc2 = torch.nn.Linear(settings.intermediate_size, settings.hidden_size)
        self._activation = activation_of(settings.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self._activation(self.fc1(x)))
        return out


class _Layer(torch.nn.Module):
    def __init__(self, settings: _Clip) -> None:
        super().__init__()
        self.layer_norm1 = _norm(settings)
        self.self_attn = _Attention(settings)
        self.layer_norm2 = _norm(settings)
        self.mlp = _Mlp(settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        out: torch.Tensor = x + self.mlp(self.layer_norm2(x))
        return out


class _Embeddings(torch.nn.Module):
    """Patches with learnt positions, behind CLIP's token of the whole picture."""

    def __init__(self, settings: _Clip) -> None:
        super().__init__()
        patches, hidden = (settings.image_size // settings.patch_size) ** 2, settings.hidden_size
        if settings.is_clip:
            self.class_embedding = torch.nn.Parameter(0.02 * torch.randn(hidden))
        sizes = CHANNELS, settings.patch_size, settings.patch_size
        self.patch_embedding = PatchProjection(hidden, *sizes, bias=not settings.is_clip)
        self.position_embedding = torch.nn.Embedding(patches + settings.is_clip, hidden)
        self._is_clip = settings.is_clip

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """``[pictures, n, values]`` to ``[pictures, n + 1 or n, hidden]``."""
        found = self.patch_embedding(patches)
        if self._is_clip:
            whole = self.class_embedding.expand(len(found), 1, -1)
            found = torch.cat([whole, found], dim=1)
        out: torch.Tensor = found + self.position_embedding.weight
        return out


class _Encoder(torch.nn.Module):
    def __init__(self, settings: _Clip) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            _Layer(settings) for _ in range(settings.num_hidden_layers)
        )


class _Head(torch.nn.Module):
    """SigLIP's pooling, which rows have no use for: weights alone."""

    def __init__(self, settings: _Clip) -> None:
        super().__init__()
        hidden = settings.hidden_size
        self.probe = torch.nn.Parameter(torch.randn(1, 1, hidden))
        self.attention = torch.nn.MultiheadAttention(hidden, settings.num_attention_heads)
        self.layernorm = _norm(settings)
        self.mlp = _Mlp(settings)


class _Tower(torch.nn.Module):
    def __init__(self, settings: _Clip) -> None:
        super().__init__()
        self.embeddings = _Embeddings(settings)
        self.pre_layrnorm = _norm(settings) if settings.is_clip else torch.nn.Identity()
        self.encoder = _Encoder(settings)
        self.post_layernorm = _norm(settings)
        if isinstance(settings, _Siglip) and settings.vision_use_head:
            self.head = _Head(settings)

    def forward(self, patches: torch.Tensor, wanted: Sequence[int]) -> torch.Tensor:
        """Hidden states behind the layers `wanted`, side by side; no layer further is run."""
        x = self.pre_layrnorm(self.embeddings(patches))
        states = [x]
        for layer in self.encoder.layers[: max(wanted)]:
            states.append(x := layer(x))
        return torch.cat([states[number] for number in wanted], dim=-1)


class _Projector(torch.nn.Module):
    def __init__(self, config: Mapping[str, Any], hidden: int, row_hidden: int) -> None:
        super().__init__()
        bias = config.get("multimodal_projector_bias", True)
        self.linear_1 = torch.nn.Linear(hidden, row_hidden, bias=bias)
        self.linear_2 = torch.nn.Linear(row_hidden, row_hidden, bias=bias)
        self._activation = activation_of(config.get("projector_hidden_act", "gelu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear_2(self._activation(self.linear_1(x)))
        return out


class LlavaEncoder(PatchEncoder):
    """What ``vision_tower`` and ``multi_modal_projector`` are in LLaVA.

    Raises:
        ValueError: the tower is neither CLIP's nor SigLIP's, or rows do not stand for patches.
    """

    prefixes: ClassVar[Mapping[str, str]] = {
        "model.vision_tower.vision_model.": "vision_tower.",
        "vision_tower.vision_model.": "vision_tower.",
        "model.vision_tower.": "vision_tower.",
        "vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "multi_modal_projector.": "multi_modal_projector.",
    }
    projectors = ("multi_modal_projector.",)

    def __init__(
        self,
        config: Mapping[str, Any],
        pixels: Pixels | None = None,
        patches_per_pack: int = PATCHES_PER_PACK,
    ) -> None:
        super().__init__(config, pixels, patches_per_pack)
        vision = config["vision_config"]
        settings = _TOWERS[vision.get("model_type", _USUAL)][0].of(vision)
        layers, row_hidden = (
            settings.num_hidden_layers,
            config["text_config"].get("hidden_size", _LLAMA),
        )
        wanted = config.get("vision_feature_layer", -2)
        numbers = [wanted] if isinstance(wanted, int) else wanted
        self._wanted = [number % (layers + 1) for number in numbers]
        strategy = config.get("vision_feature_select_strategy", "default")
        self._num_left_out = int(strategy == "default")
        self._side = settings.image_size // settings.patch_size
        self.shape = Encoder(
            resizing=Resizing(patch=settings.patch_size, merge=1, square=settings.image_size),
            layers=max(self._wanted),
            hidden=settings.hidden_size,
            ffn=settings.intermediate_size,
            values=CHANNELS * settings.patch_size**2,
            has_class_token=settings.is_clip,
            attended=4,
            activations=3 if settings.hidden_act == "quick_gelu" else 2,
            projector_norm=False,
            projected_layers=len(numbers),
            projector_hidden=row_hidden,
            row_hidden=row_hidden,
        )
        self._require_rows(settings, strategy)
        self.vision_tower = _Tower(settings)
        width = settings.hidden_size * len(numbers)
        self.multi_modal_projector = _Projector(config, width, row_hidden)

    @staticmethod
    def usual_pixels(config: Mapping[str, Any]) -> Pixels:
        """The tower's.

        Raises:
            ValueError: it is neither CLIP's nor SigLIP's.
        """
        kind = config["vision_config"].get("model_type", _USUAL)
        if kind not in _TOWERS:
            raise ValueError(
                f"found a vision tower {kind!r}, expected {' or '.join(_TOWERS)}: LLaVA's with "
                "others are not known"
            )
        return _TOWERS[kind][1]

    def encoded(self, patches: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Rows, ``[rows, hidden]``."""
        found = self.vision_tower(patches.unflatten(0, (len(grids), -1)), self._wanted)
        of_patches = found[:, self._num_left_out :].flatten(0, 1)
        rows: torch.Tensor = self.multi_modal_projector(of_patches)
        return rows

    def _require(self, item: Patches) -> None:
        super()._require(item)
        if item.grid != (1, self._side, self._side):
            raise ValueError(
                f"found a grid of {' x '.join(map(str, item.grid))} patches, expected 1 x "
                f"{self._side} x {self._side}: LLaVA's encoder takes pictures of one size"
            )

    def _require_rows(self, settings: _Clip, strategy: str) -> None:
        if (strategy == "default") != settings.is_clip:
            raise ValueError(
                f"found vision_feature_select_strategy {strategy!r}, expected "
                f"{'default' if settings.is_clip else 'full'!r} for this tower: a row stands for "
                "a patch"
            )


def _norm(settings: _Clip) -> torch.nn.LayerNorm:
    return torch.nn.LayerNorm(settings.hidden_size, eps=settings.layer_norm_eps)
