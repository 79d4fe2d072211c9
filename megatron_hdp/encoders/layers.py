"""Layers that several encoders have, with the names that Hugging Face gives to their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional

from megatron_hdp.encoders.blocks import Blocks, CutBlock, Rotation, wide


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "relu": functional.relu,
    "silu": functional.silu,
}


def activation_of(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function of a configuration's name.

    Raises:
        ValueError: it is none of those that encoders have.
    """
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"found the activation {name!r} of an encoder, expected one of "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


class PatchProjection(torch.nn.Module):
    """A convolution over patches that do not overlap; so a matrix.

    Attributes:
        weight: ``[hidden, colours, ..., p, p]``.
    """

    def __init__(self, hidden: int, *patch: int, bias: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden, *patch))
        self.bias = torch.nn.Parameter(torch.zeros(hidden)) if bias else None
        torch.nn.init.normal_(self.weight, std=0.02)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """``[n, values]`` to ``[n, hidden]``."""
        return functional.linear(patches, self.weight.flatten(1), self.bias)


class RmsNorm(torch.nn.Module):
    """By the root of the mean square."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[n, hidden]``."""
        long = x.to(wide(x.dtype))
        scaled = long * torch.rsqrt(long.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * scaled.to(x.dtype)


class RotaryAttention(torch.nn.Module):
    """Self attention with rotary positions in two dimensions; one matrix for all three."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(hidden, 3 * hidden)
        self.proj = torch.nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor, blocks: Blocks | CutBlock, turned: Rotation) -> torch.Tensor:
        """``[n, hidden]``."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        out: torch.Tensor = self.proj(blocks.attend(turned(query), turned(key), value))
        return out


class PatchEmbedding(torch.nn.Module):
    """A projection of patches under the name that Qwen's files give it."""

    def __init__(self, hidden: int, *patch: int, bias: bool) -> None:
        super().__init__()
        self.proj = PatchProjection(hidden, *patch, bias=bias)


class RotaryLayer(torch.nn.Module):
    """A layer of Qwen's encoders: attention and an MLP, each behind its norm."""

    def __init__(self, hidden: int, heads: int, norms: Sequence[torch.nn.Module], mlp: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = norms
        self.attn = RotaryAttention(hidden, heads)
        self.mlp = mlp

    def forward(self, x: torch.Tensor, blocks: Blocks | CutBlock, turned: Rotation) -> torch.Tensor:
        """``[n, hidden]``."""
        x = x + self.attn(self.norm1(x), blocks, turned)
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out
