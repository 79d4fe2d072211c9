"""Which attention a run uses: chosen once at the start, tried on a few tokens, and said.

An attention backend computes a whole micro-batch, rings included. TransformerEngine brings a ring
of its own; a block kernel becomes a backend by our own ring (`ring.attention.RingAttention`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_hdp.runtime.attention.backend import NO_RUN, AttentionBackend, RunShapes
from megatron_hdp.runtime.attention.transformer_engine import TransformerEngineAttention
from megatron_hdp.runtime.attention.trial import try_out, try_out_ring
from megatron_hdp.runtime.kernels import (
    CpuFlashKernel,
    FlashAttnKernel,
    MatmulKernel,
    PaddedKernel,
    TorchFlashKernel,
    refusal,
)
from megatron_hdp.runtime.ring import RingAttention, RingComm, RingGroup

OUR_RING = "flash-attn or torch"
"""Those whose kernels serve our own ring."""

# What a package that was built for other versions or another GPU may raise, loaded or tried.
_REFUSALS = (ImportError, OSError, RuntimeError, ValueError, AssertionError, AttributeError)


@dataclass(frozen=True)
class Selection:
    """The backend of a run, and why it is not one that would have been preferred."""

    backend: AttentionBackend
    refused: dict[str, str]
    """Name as ``--hdp-attention`` knows it -> why not; in order of preference."""
    notes: tuple[str, ...] = ()
    """What else a user should know of the backend."""

    def __str__(self) -> str:
        """One line for the log."""
        why_not = [f"not {name}: {why}" for name, why in self.refused.items()]
        return "; ".join((self.backend.name, *self.notes, *why_not))


def select_attention(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    choice: str = "auto",
    comm: RingComm | None = None,
    shapes: RunShapes = NO_RUN,
) -> Selection:
    """The attention for tensors of this kind: the first that loads, fits and computes rightly.

    Args:
        device: a CPU or an NVIDIA GPU.
        dtype: of queries, keys and values.
        head_dim: of queries and keys, and of values unless the shapes say otherwise.
        choice: "auto", `OUR_RING`, or the one name of ``--hdp-attention`` to take.
        comm: where given, TransformerEngine must accept a ring's group over it, and is tried on
            a ring too.
        shapes: what the run will ask for.

    Raises:
        ValueError: there is none, or not the one that was chosen; says why.
    """
    refused: dict[str, str] = {}
    for name in _SEVERAL.get(choice, (choice,)):
        try:
            backend = _LOADERS[name](device, dtype, max(head_dim, shapes.value_dim or 0), comm)
            if shapes.value_dim not in (None, head_dim) and isinstance(backend, RingAttention):
                backend = RingAttention(PaddedKernel(backend.kernel))
            try_out(backend, device, dtype, head_dim, shapes)
            notes: tuple[str, ...] = ()
            if isinstance(backend, TransformerEngineAttention):
                if comm is not None and shapes.num_ranks > 1:
                    try_out_ring(backend, comm, device, dtype, head_dim, shapes)
                notes = backend.check(shapes)
        except _REFUSALS as error:
            why = " ".join(str(error).split())
            ours = isinstance(error, ValueError)  # a sentence that needs no class before it
            refused[name] = why if ours else f"{type(error).__name__}: {why[:300]}"
        else:
            return Selection(backend, refused, notes)
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
_SEVERAL = {"auto": tuple(_LOADERS), OUR_RING: ("flash-attn", "torch")}
