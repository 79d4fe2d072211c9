"""Fills in what megatron-core 0.16 gets wrong where it finds no TransformerEngine.

A router of experts tests a name that is only imported together with TransformerEngine, and latent
attention compares with something that is no class without it: either would end in an error. On a
machine without a GPU the CPU shim does this.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

from megatron_hdp.overrides import Overrides

_ROUTERS = "megatron.core.transformer.moe.moe_utils"
_LATENT = "megatron.core.transformer.multi_latent_attention"
GAPS = {
    f"{_ROUTERS}.te_general_gemm": "None where TransformerEngine is missing; Megatron 0.16 tests "
    "it without having defined it",
    f"{_LATENT}.HAVE_TE": "false where TransformerEngine is missing; Megatron 0.16 then compares "
    "with what stands in for a class of its",
}
_filled = Overrides()


def gap_of(module: types.ModuleType) -> tuple[str, Any] | None:
    """The name in a module of Megatron's that is wrong, and its right value; None: none is."""
    names = vars(module)
    name, linear = names.get("__name__"), names.get("TELinear")
    if name == _ROUTERS and "te_general_gemm" not in names:
        return "te_general_gemm", None
    if name == _LATENT and names.get("HAVE_TE") and not isinstance(linear, type):
        return "HAVE_TE", False
    return None


def fill() -> None:
    """Puts right what is wrong; a second call does nothing."""
    for name in (_ROUTERS, _LATENT):
        module = importlib.import_module(name)
        if gap := gap_of(module):
            _filled.set(module, *gap)


def revert() -> None:
    """Restores what was there before `fill`."""
    _filled.undo()
