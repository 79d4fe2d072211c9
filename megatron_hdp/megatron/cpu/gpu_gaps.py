"""Fills in what megatron-core 0.16 leaves undefined where it finds no TransformerEngine.

A router of experts tests a name that is only imported together with TransformerEngine, so every
mixture of experts would end in a NameError. On a machine without a GPU the CPU shim does this.
"""

from __future__ import annotations

from megatron.core.transformer.moe import moe_utils

GAPS = {
    "megatron.core.transformer.moe.moe_utils.te_general_gemm": "None where TransformerEngine is "
    "missing; Megatron 0.16 tests it without having defined it",
}
_NAME = "te_general_gemm"
_filled = False


def fill() -> None:
    """Defines what is missing; a second call does nothing."""
    global _filled
    if not hasattr(moe_utils, _NAME):
        setattr(moe_utils, _NAME, None)
        _filled = True


def revert() -> None:
    """Takes away what `fill` defined."""
    global _filled
    if _filled:
        delattr(moe_utils, _NAME)
        _filled = False
