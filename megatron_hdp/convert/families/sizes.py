"""The sizes of a model by one word each, in which tables state the shapes of tensors."""

from __future__ import annotations

from collections.abc import Mapping

Sizes = Mapping[str, int]


def shape_of(text: str, sizes: Sizes) -> tuple[int, ...]:
    """The shape that words stand for: ``"query hidden"`` is ``(4096, 4096)``, for example."""
    return tuple(sizes[word] for word in text.split())
