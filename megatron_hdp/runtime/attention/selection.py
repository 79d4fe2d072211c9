"""Which attention a run uses: chosen once at the start, tried on a few tokens, and said.

An attention backend computes a whole micro-batch, rings included. TransformerEngine brings a ring
of its own; a block kernel becomes a backend by our own ring (`ring.attention.RingAttention`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_hdp.runtime.attention.backend import AttentionBackend, RunShapes
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

_Loader = Callable[[RunShapes, RingComm | None], AttentionBackend]
OUR_RING = "flash-attn or torch"
"""Those whose kernels serve our own ring."""

# What a package that was built for other versions or another GPU may raise, loaded or tried; one
# with other arguments or tables than the known ones: TypeError and LookupError.
_REFUSALS = (
    *(ImportError, OSError, RuntimeError, ValueError, AssertionError, AttributeError),
    *(TypeError, LookupError),
)


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
    shapes: RunShapes, choice: str = "auto", comm: RingComm | None = None
) -> Selection:
    """The attention of a run: the first that loads, fits and computes rightly.

    Args:
        shapes: what the run will ask for.
        choice: "auto", `OUR_RING`, or the one name of ``--hdp-attention`` to take.
        comm: where given, TransformerEngine must accept a ring's group over it, and is tried on
            a ring too.

    Raises:
        ValueError: there is none, or not the one that was chosen; says why.
    """
    refused: dict[str, str] = {}
    for name in _names(choice, shapes):
        try:
            backend = _LOADERS[name](shapes, comm)
            differ = shapes.value_dim not in (None, shapes.head_dim)
            if differ and isinstance(backend, RingAttention):
                backend = RingAttention(PaddedKernel(backend.kernel))
            try_out(backend, shapes)
            notes: tuple[str, ...] = ()
            if isinstance(backend, TransformerEngineAttention):
                if comm is not None and shapes.num_ranks > 1 and backend.takes_rings:
                    try_out_ring(backend, comm, shapes)
                notes = backend.check(shapes)
        except _REFUSALS as error:
            if name in _NEWER:
                TorchFlashKernel.restore()
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
        f"no attention for {str(shapes.dtype).removeprefix('torch.')} on device '{shapes.device}' "
        f"with head dimension {shapes.head_dim}, --hdp-attention {choice}:{reasons}\n{remedy}"
    )


def _transformer_engine(shapes: RunShapes, comm: RingComm | None) -> AttentionBackend:
    _require_gpu(shapes)
    if shapes.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"found {shapes.dtype}; it computes in bfloat16 and float16")
    if comm is not None:
        group = RingGroup(comm, tuple(range(comm.group.size())))
        group.require_acceptance()
        group.release()
    return TransformerEngineAttention(shapes.device)


def _flash_attn(shapes: RunShapes, comm: RingComm | None) -> AttentionBackend:
    _require_gpu(shapes)
    if (why := refusal(shapes.dtype, shapes.largest_head)) is not None:
        raise ValueError(why)
    return RingAttention(FlashAttnKernel())


def _newer_flash(newer: str) -> _Loader:
    """PyTorch's flash kernels in place of which a newer package's run, wherever they are called."""

    def load(shapes: RunShapes, comm: RingComm | None) -> AttentionBackend:
        if (why := refusal(shapes.dtype, shapes.largest_head)) is not None:
            raise ValueError(why)
        return RingAttention(TorchFlashKernel(newer))

    return load


def _torch(shapes: RunShapes, comm: RingComm | None) -> AttentionBackend:
    if shapes.device.type == "cpu":
        return RingAttention(CpuFlashKernel())
    _require_gpu(shapes)
    flash = refusal(shapes.dtype, shapes.largest_head) is None
    return RingAttention(TorchFlashKernel() if flash else MatmulKernel())


def _require_gpu(shapes: RunShapes) -> None:
    if shapes.device.type != "cuda":
        raise ValueError(f"found device '{shapes.device}'; it needs an NVIDIA GPU")


_NEWER = ("FlashAttention 3", "FlashAttention 4")  # from Hopper on, where their packages are
_LOADERS: dict[str, _Loader] = {  # in order of preference
    "transformer-engine": _transformer_engine,
    _NEWER[0]: _newer_flash("FA3"),
    _NEWER[1]: _newer_flash("FA4"),
    "flash-attn": _flash_attn,
    "torch": _torch,
}
_SEVERAL = {
    "auto": tuple(_LOADERS),
    OUR_RING: (*_NEWER, "flash-attn", "torch"),
    "torch": (*_NEWER, "torch"),
}


def _names(choice: str, shapes: RunShapes) -> tuple[str, ...]:
    names = _SEVERAL.get(choice, (choice,))
    return tuple(name for name in names if name not in _NEWER or shapes.device.type == "cuda")
