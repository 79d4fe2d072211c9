"""How tensors of Hugging Face stand in one of Megatron's: one below another, or by groups.

A layout says which of them form a part, that is read, changed and written at once, and where that
stands in Megatron's tensor. What it changes, it changes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

Sizes = Mapping[str, int]
"""The sizes of a model by one word each, in which tables state the shapes of tensors."""
Shape = tuple[int, ...]


def shape_of(text: str, sizes: Sizes) -> Shape:
    """The shape that words stand for: ``"query hidden"`` is ``(4096, 4096)``, for example."""
    return tuple(sizes[word] for word in text.split())


@dataclass(frozen=True)
class Part:
    """A region of one of Megatron's tensors, of one layer and one expert."""

    sources: tuple[int, ...]
    """Which of the row's tensors it is made of."""
    first: int
    """Row of Megatron's tensor at which it begins."""
    shape: Shape


class Layout:
    """One tensor below another, as the gate of a gated MLP stands above its other half."""

    def parts(self, shapes: Sequence[Shape], sizes: Sizes) -> list[Part]:
        """The regions of Megatron's tensor, given the shapes of Hugging Face's: one of each."""
        found, first = [], 0
        for i, shape in enumerate(shapes):
            found.append(Part((i,), first, shape))
            first += shape[0]
        return found

    def to_megatron(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
        """A part from its tensors."""
        return tensors[0]

    def to_hugging_face(self, tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        """The tensors of a part."""
        return [tensor]


class ByGroup(Layout):
    """Queries, keys and values: group by group its heads of queries, its keys, its values."""

    def parts(self, shapes: Sequence[Shape], sizes: Sizes) -> list[Part]:
        """All three are one part."""
        rows = sum(shape[0] for shape in shapes)
        return [Part((0, 1, 2), 0, (rows, *shapes[0][1:]))]

    def to_megatron(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
        """Written piece by piece into what was asked for once."""
        rows = sum(tensor.shape[0] for tensor in tensors)
        whole = tensors[0].new_empty(rows, *tensors[0].shape[1:])
        for part, tensor in zip(self._views(whole, sizes), tensors, strict=True):
            part.copy_(tensor.view(part.shape))
        return whole

    def to_hugging_face(self, tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        """A copy of each of the three."""
        return [part.reshape(-1, *tensor.shape[1:]) for part in self._views(tensor, sizes)]

    @staticmethod
    def _views(whole: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, ...]:
        groups, head = sizes["groups"], sizes["head"]
        by_group = whole.view(groups, -1, *whole.shape[1:])
        queries = by_group.shape[1] - 2 * head
        return tuple(by_group.split([queries, head, head], dim=1))


class Transposed(Layout):
    """An expert's matrix whose columns are Megatron's rows."""

    def parts(self, shapes: Sequence[Shape], sizes: Sizes) -> list[Part]:
        """One."""
        return [Part((0,), 0, shapes[0][::-1])]

    def to_megatron(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
        """A copy, row by row in memory."""
        return tensors[0].t().contiguous()

    def to_hugging_face(self, tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        """As it lies in memory."""
        return [tensor.t()]


class InTurns(Transposed):
    """The same of a gated MLP: its columns, or numbers, are gate and other half in turns."""

    def to_megatron(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
        """All of the gate first."""
        rows = tensors[0].movedim(-1, 0)
        return torch.cat((rows[0::2], rows[1::2]))

    def to_hugging_face(self, tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        """In turns."""
        return [torch.stack(tensor.chunk(2), dim=-1).movedim(0, -2).flatten(-2)]


TRANSPOSED, IN_TURNS = Transposed(), InTurns()
BY_GROUP = ByGroup()
