"""Fills in what megatron-core 0.16 gets wrong where it finds no TransformerEngine.

A router of experts tests a name that is only imported together with TransformerEngine, and latent
attention compares with something that is no class without it: either would end in an error. On a
machine without a GPU the CPU shim does this.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils

GAPS = {
    "megatron.core.transformer.moe.moe_utils.te_general_gemm": "None where TransformerEngine is "
    "missing; Megatron 0.16 tests it without having defined it",
    "megatron.core.transformer.multi_latent_attention.HAVE_TE": "false where TransformerEngine is "
    "missing; Megatron 0.16 then compares with what stands in for a class of its",
}
_MISSING = object()
_before: list[tuple[Any, str, Any]] = []


def fill() -> None:
    """Puts right what is wrong; a second call does nothing."""
    if not hasattr(moe_utils, "te_general_gemm"):
        _set(moe_utils, "te_general_gemm", None)
    latent: Any = multi_latent_attention
    if latent.HAVE_TE and not isinstance(latent.TELinear, type):
        _set(latent, "HAVE_TE", False)


def revert() -> None:
    """Restores what was there before `fill`."""
    while _before:
        module, name, value = _before.pop()
        if value is _MISSING:
            delattr(module, name)
        else:
            setattr(module, name, value)


def _set(module: Any, name: str, value: Any) -> None:
    _before.append((module, name, getattr(module, name, _MISSING)))
    setattr(module, name, value)
