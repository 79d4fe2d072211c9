"""Flash-attention's varlen kernels for GPUs as block kernels: PyTorch's, and flash-attn's.

Both keep the log-sum-exp as contiguous float32 ``[heads, t]`` and read it by its address, so it
travels as a transposed view of that. Both want bfloat16 or float16, and head dimensions that are
multiples of 8 up to 256.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from megatron_hdp.runtime.kernels.segments import Block, Forward, Gradients

_OLDEST_FLASH_ATTN = (2, 7)  # window sizes as two arguments, four results


def refusal(dtype: torch.dtype, head_dim: int) -> str | None:
    """Why flash kernels cannot serve such inputs, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        return f"found {name}; flash kernels compute in bfloat16 and float16"
    if head_dim % 8 or head_dim > 256:
        return f"found head dimension {head_dim}; flash kernels take multiples of 8 up to 256"
    return None


class TorchFlashKernel:
    """The flash-attention kernels of PyTorch (`aten._flash_attention_*`): FlashAttention 2.

    Args:
        newer: "FA3" or "FA4" instead, in the whole process from now on (`restore` ends it).

    Raises:
        ImportError: PyTorch or the package of the newer ones is missing or too old.
        RuntimeError, ValueError: PyTorch does not take them.
    """

    def __init__(self, newer: str | None = None) -> None:
        if newer is not None:
            from torch.nn.attention import activate_flash_attention_impl

            activate_flash_attention_impl(newer)
        self.name = "torch-flash" if newer is None else f"torch-flash {newer}"

    @staticmethod
    def restore() -> None:
        """FlashAttention 2 again; nothing where PyTorch knows no other."""
        with suppress(ImportError):
            from torch.nn.attention import restore_flash_attention_impl

            restore_flash_attention_impl(_raise_warn=False)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `kernels.AttentionKernel.forward`."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(q, k, v, *_lengths(block)),
            0.0,  # dropout
            block.causal,
            False,  # no debug mask
            scale=scale,
            **_sides(block.window),
        )
        return out, lse.transpose(0, 1)

    def backward(self, dout: torch.Tensor, of: Forward, block: Block, scale: float) -> Gradients:
        """See `kernels.AttentionKernel.backward`."""
        *tensors, lse = of
        random_state = torch.empty(2, dtype=torch.uint64, device=dout.device)  # read with dropout
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout,
            *tensors,
            lse.transpose(0, 1).contiguous(),
            *_lengths(block),
            0.0,
            block.causal,
            random_state,
            random_state,
            scale=scale,
            **_sides(block.window),
        )
        return dq, dk, dv


class FlashAttnKernel:
    """The package flash-attn, version 2.7 or newer.

    Raises:
        ImportError, OSError: the package or a library of its is missing.
        ValueError: the package is older.
    """

    def __init__(self) -> None:
        import flash_attn
        from flash_attn import flash_attn_interface

        found = tuple(int(part) for part in flash_attn.__version__.split(".")[:2])
        if found < _OLDEST_FLASH_ATTN:
            raise ValueError(f"found flash-attn {flash_attn.__version__}, expected 2.7 or newer")
        self.name = f"flash-attn {flash_attn.__version__}"
        self._interface: Any = flash_attn_interface

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `kernels.AttentionKernel.forward`."""
        out, lse, *_ = self._interface._flash_attn_varlen_forward(
            *(q, k, v, *_lengths(block)),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=block.causal,
            **_sides(block.window, none=-1),
        )
        return out, lse.transpose(0, 1)

    def backward(self, dout: torch.Tensor, of: Forward, block: Block, scale: float) -> Gradients:
        """See `kernels.AttentionKernel.backward`."""
        *tensors, lse = of
        gradients = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in of[:3])
        self._interface._flash_attn_varlen_backward(
            dout,
            *tensors,
            lse.transpose(0, 1).contiguous(),
            *gradients,
            *_lengths(block),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=block.causal,
            **_sides(block.window, none=-1),
            softcap=0.0,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        dq, dk, dv = gradients
        return dq, dk, dv


def _lengths(block: Block) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Offsets of queries and keys, then the longest segment of either."""
    queries, keys = block.q_segments, block.k_segments
    return queries.offsets, keys.offsets, queries.longest, keys.longest


def _sides(window: int | None, none: int | None = None) -> dict[str, int | None]:
    """The window as keys before and behind the query's own; without one, `none` on both sides."""
    before, behind = (none, none) if window is None else (window - 1, 0)
    return {"window_size_left": before, "window_size_right": behind}
