"""Megatron's hybrids: which blocks HDP trains, and which it refuses and why.

A hybrid's layer is one block: attention, an MLP or a mixture of experts.
"""

from __future__ import annotations

import sys
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp

from megatron_hdp.megatron.options import require_known_letters

_MODULE = "megatron.core.models.hybrid.hybrid_model"


class _NoModel:
    """What no model is."""


def hybrid_class() -> type[Any]:
    """megatron.core's ``HybridModel``; where nothing has imported it, a class that no model has."""
    found: type[Any] = getattr(sys.modules.get(_MODULE), "HybridModel", _NoModel)
    return found


def require_known_blocks(stack: Any) -> None:
    """Refuses a stack of layers with blocks whose tokens HDP cannot place.

    Args:
        stack: of a hybrid, or of a layer of multi-token prediction; others have no letters.

    Raises:
        ValueError: names the layer, its letter and the reason.
    """
    letters = getattr(stack, "layer_type_list", None) or ()
    for letter, layer in zip(letters, getattr(stack, "layers", ()), strict=True):
        require_known_letters(
            letter, f"layer {layer.layer_number} of the hybrid", f" ({_named(layer)})"
        )


def attends(layer: Any) -> bool:
    """Whether a layer has self-attention; a hybrid's MLPs have none."""
    return not isinstance(layer.self_attention, IdentityOp)


def _named(layer: Any) -> str:
    inner = getattr(layer, "self_attention", layer)
    return type(inner).__name__
