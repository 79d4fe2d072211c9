"""Which attention a run uses: chosen once at the start, tried on a few tokens, and said.

An attention backend computes a whole micro-batch, rings included. TransformerEngine brings a ring
of its own; a block kernel becomes a backend by our own ring (`ring.attention.RingAttention`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_hdp.runtime.attention.transformer_engine import TransformerEngineAttention
from megatron_hdp.runtime.kernels import (
    CpuFlashKernel,
    FlashAttnKernel,
    MatmulKernel,
    TorchFlashKernel,
    refusal,
)
from megatron_hdp.runtime.ring import RingAttention, RingComm, RingGroup, TokenLayout


class AttentionBackend(Protocol):
    """Causal attention of every sequence of a micro-batch, each within itself."""

    name: str

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: TokenLayout,
        comm: RingComm,
        scale: float,
    ) -> torch.Tensor:
        """Attends, together with the other members of the layout's ring.

        Args:
            q: ``[t, heads, d]``, this rank's tokens in the layout's order.
            k: ``[t, kv_heads, d]``.
            v: ``[t, kv_heads, d]``.
            layout: what the tokens are; equal ring slices on every member.
            comm: the HDP communicator; not used when the layout has no ring.
            scale: softmax scale, usually ``1 / sqrt(d)``.

        Returns:
            ``[t, heads, d]``, differentiable in `q`, `k` and `v`.

        Raises:
            ValueError: the tensors do not have the layout's tokens.
        """
        ...


# What a package that was built for other versions or another GPU may raise, loaded or tried.
_REFUSALS = (ImportError, OSError, RuntimeError, ValueError, AssertionError, AttributeError)
_TRIAL_LENGTHS = (48, 16)
_TRIAL_TOLERANCE = 2e-2  # bfloat16 keeps 8 bits


@dataclass(frozen=True)
class Selection:
    """The backend of a run, and why it is not one that would have been preferred."""

    backend: AttentionBackend
    refused: dict[str, str]
    """Name as ``--hdp-attention`` knows it -> why not; in order of preference."""

    def __str__(self) -> str:
        """One line for the log."""
        why_not = "".join(f"; not {name}: {why}" for name, why in self.refused.items())
        return f"{self.backend.name}{why_not}"


def select_attention(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    choice: str = "auto",
    comm: RingComm | None = None,
) -> Selection:
    """The attention for tensors of this kind: the first that loads, fits and computes rightly.

    Args:
        device: a CPU or an NVIDIA GPU.
        dtype: of queries, keys and values.
        head_dim: of queries, keys and values.
        choice: "auto", or names of ``--hdp-attention`` to take one of, with " or " between.
        comm: where given, TransformerEngine must accept a ring's group over it.

    Raises:
        ValueError: there is none, or not the one that was chosen; says why.
    """
    refused: dict[str, str] = {}
    for name in _LOADERS if choice == "auto" else choice.split(" or "):
        try:
            backend = _LOADERS[name](device, dtype, head_dim, comm)
            try_out(backend, device, dtype, head_dim)
        except _REFUSALS as error:
            why = " ".join(str(error).split())[:300]
            ours = isinstance(error, ValueError)  # a sentence that needs no class before it
            refused[name] = why if ours else f"{type(error).__name__}: {why}"
        else:
            return Selection(backend, refused)
    reasons = "".join(f"\n  {name}: {why}" for name, why in refused.items())
    remedy = (
        "use a GPU of the Ampere generation or newer, or --bf16"
        if choice == "auto"
        else "install or repair it, or choose --hdp-attention auto"
    )
    raise ValueError(
        f"no attention for {str(dtype).removeprefix('torch.')} on device '{device}' with head "
        f"dimension {head_dim}, --hdp-attention {choice}:{reasons}\n{remedy}"
    )


def try_out(
    backend: AttentionBackend, device: torch.device, dtype: torch.dtype, head_dim: int
) -> None:
    """Compares a few tokens, forward and backward, with plain matrix products.

    A package may load and still have no code for this GPU, or none for these shapes.

    Raises:
        RuntimeError: output or gradients differ; the message says by how much.
    """
    layout = TokenLayout((0,), 0, (), _TRIAL_LENGTHS, device)
    random = torch.Generator().manual_seed(0)
    shapes = [(sum(_TRIAL_LENGTHS), heads, head_dim) for heads in (4, 2, 2, 4)]
    no_ring: Any = None  # nothing is sent
    *inputs, dout = (torch.randn(s, generator=random).to(device, dtype) for s in shapes)

    def results_of(attend: AttentionBackend) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attend(leaves[0], leaves[1], leaves[2], layout, no_ring, head_dim**-0.5)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    expected = results_of(RingAttention(MatmulKernel()))
    for what, found, wanted in zip(
        ("out", "dq", "dk", "dv"), results_of(backend), expected, strict=True
    ):
        error = float((found - wanted).float().norm() / wanted.float().norm())
        if not error <= _TRIAL_TOLERANCE:
            raise RuntimeError(
                f"{backend.name} computes {what} with relative error {error:.1g} on a trial of "
                f"{_TRIAL_LENGTHS} tokens, expected at most {_TRIAL_TOLERANCE}"
            )


def _transformer_engine(
    device: torch.device, dtype: torch.dtype, head_dim: int, comm: RingComm | None
) -> AttentionBackend:
    _require_gpu(device)
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"found {dtype}; it computes in bfloat16 and float16")
    if comm is not None:
        group = RingGroup(comm, tuple(range(comm.group.size())))
        group.require_acceptance()
        group.release()
    return TransformerEngineAttention(device)


def _flash_attn(
    device: torch.device, dtype: torch.dtype, head_dim: int, comm: RingComm | None
) -> AttentionBackend:
    _require_gpu(device)
    if (why := refusal(dtype, head_dim)) is not None:
        raise ValueError(why)
    return RingAttention(FlashAttnKernel())


def _torch(
    device: torch.device, dtype: torch.dtype, head_dim: int, comm: RingComm | None
) -> AttentionBackend:
    if device.type == "cpu":
        return RingAttention(CpuFlashKernel())
    _require_gpu(device)
    flash = refusal(dtype, head_dim) is None
    return RingAttention(TorchFlashKernel() if flash else MatmulKernel())


def _require_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(f"found device '{device}'; it needs an NVIDIA GPU")


_Loader = Callable[[torch.device, torch.dtype, int, RingComm | None], AttentionBackend]
_LOADERS: dict[str, _Loader] = {  # in order of preference
    "transformer-engine": _transformer_engine,
    "flash-attn": _flash_attn,
    "torch": _torch,
}
