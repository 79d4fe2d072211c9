"""Parts of a micro-batch: where each one's tokens lie, and what of them later parts see.

A part is a packed layout of its own. Of a sequence that began in an earlier part, keys and values
stay on the rank that made them (`EarlierKeys`). Backward runs from the last part to the first: what
a part finds for the keys of earlier ones is added up where they stay, until the backward of their
own part takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch

from megatron_hdp.runtime.kernels import Block, Segments
from megatron_hdp.runtime.ring.layout import TokenLayout
from megatron_hdp.runtime.ring.travelling import wide_type

RING, LOCAL = "ring", "local"

SumType: TypeAlias = Callable[[torch.Tensor], torch.dtype]
"""The dtype in which gradients of such a key or value are added up."""


class Stretch(NamedTuple):
    """Some of what this rank keeps of a sequence for later parts."""

    key: tuple[str | int, ...]
    """`RING` or `LOCAL` and the part in which the sequence begins."""
    first: int
    stop: int
    total: int
    """Tokens of the sequence that are kept here when all of its parts but the last have run."""

    def last(self, num_tokens: int) -> Stretch:
        """That many tokens up to its end, as what is kept in their place."""
        return Stretch((*self.key, self.stop), 0, num_tokens, num_tokens)


@dataclass(frozen=True, eq=False)
class PartLayout(TokenLayout):
    """The packed tokens of one part; of two sequences others may lie in other parts.

    Those are the first of its ring slices and the first of its whole sequences, which continue what
    earlier parts hold, and the last ones, which later parts continue.
    """

    earlier: dict[str, Stretch] = field(kw_only=True)
    """Of `RING` and `LOCAL`, where the first one began in another part: what those hold of it."""
    kept: dict[str, Stretch] = field(kw_only=True)
    """Likewise, where later parts continue the last one: where its tokens go."""
    padding: int = field(kw_only=True)
    """Tokens at the end that belong to no sequence."""
    whole_slices: tuple[int, ...] = field(kw_only=True)
    """Tokens on each member of the micro-batch's ring sequences, over all parts."""
    whole_longest: int = field(kw_only=True)
    """`longest` over all parts."""
    is_stream: bool = field(kw_only=True)
    """Whether what is kept for later parts is all that stays of them."""

    @property
    def ring_lengths(self) -> tuple[int, ...]:
        """Tokens of the micro-batch's ring sequences, over all members and parts."""
        return tuple(tokens * len(self.ring) for tokens in self.whole_slices)

    @property
    def earlier_in_ring(self) -> int:
        """Tokens that earlier parts hold of what the ring continues, over all members."""
        return self.earlier[RING].stop * len(self.ring) if RING in self.earlier else 0

    @property
    def longest(self) -> int:
        """Tokens of the longest whole sequence on this rank alone, over all parts."""
        return self.whole_longest

    def first_rows(self, kind: str) -> slice:
        """Rows of the first ring slice, or of the first whole sequence."""
        if kind == RING:
            return slice(0, self.ring_slices[0])
        return slice(self.ring_tokens, self.ring_tokens + self.local_lengths[0])

    def last_rows(self, kind: str) -> slice:
        """Rows of the last ring slice, or of the last whole sequence that is no padding."""
        if kind == RING:
            return slice(self.ring_tokens - self.ring_slices[-1], self.ring_tokens)
        end = self.num_tokens - self.padding
        return slice(end - self.local_lengths[-2 if self.padding else -1], end)

    def block_of(self, group: Group) -> Block:
        """All queries of what continues against these keys of earlier parts."""
        kind, num_keys = str(group.stretch.key[0]), group.stretch.stop - group.stretch.first
        found = self._blocks.get((kind, num_keys))
        if found is None:
            rows = self.first_rows(kind)
            queries = Segments.of((rows.stop - rows.start,), self.device)
            keys = Segments.of((num_keys,), self.device)
            found = self._blocks[kind, num_keys] = Block(queries, keys, causal=False)
        return found

    @cached_property
    def _blocks(self) -> dict[tuple[str, int], Block]:
        return {}

    @cached_property
    def by_kind(self) -> tuple[PartLayout, PartLayout]:
        """The ring's slices by themselves, and the whole sequences by themselves."""
        earlier, kept = (
            [{kind: of[kind] for kind in (one,) if kind in of} for one in (RING, LOCAL)]
            for of in (self.earlier, self.kept)
        )
        return (
            replace(self, local_lengths=(), padding=0, earlier=earlier[0], kept=kept[0]),
            replace(self, ring_slices=(), earlier=earlier[1], kept=kept[1]),
        )


class Group(NamedTuple):
    """Neighbouring keys of earlier parts, on the device."""

    stretch: Stretch
    keys: tuple[torch.Tensor, ...]
    """Keys and values, or a latent and the rotated part of keys, ``[tokens, ...]``."""


@dataclass
class _Kept:
    """What is kept of a sequence."""

    keys: tuple[torch.Tensor, ...]
    num_tokens: int = 0
    """Filled."""
    gradients: tuple[torch.Tensor, ...] = ()
    found_for: int = -1
    """Tokens for which the part that ran backward last has found gradients."""


class EarlierKeys:
    """Keys and values of one layer that later parts of a micro-batch see, and their gradients.

    Those of a sequence lie one behind another, in tensors that the first of its parts makes.

    Args:
        sum_type: of the gradients.
    """

    in_groups = False
    """Whether `groups` gives what earlier parts hold piece by piece."""

    def __init__(self, sum_type: SumType = wide_type) -> None:
        self._sum_type = sum_type
        self._of: dict[tuple[str | int, ...], _Kept] = {}

    def keep(self, layout: PartLayout, *keys: torch.Tensor) -> None:
        """Keeps what later parts see of this one."""
        for kind, stretch in layout.kept.items():
            rows = layout.last_rows(kind)
            self.put(stretch, *(one[rows] for one in keys))

    def put(self, stretch: Stretch, *keys: torch.Tensor) -> None:
        """Keeps a copy of a stretch; it stays as it is where it is computed again."""
        kept = self._of.get(stretch.key)
        if kept is None:
            rooms = (one.new_empty(stretch.total, *one.shape[1:]) for one in keys)
            kept = self._of[stretch.key] = _Kept(tuple(rooms))
        if stretch.stop > kept.num_tokens:
            kept.num_tokens = stretch.stop
            for room, one in zip(kept.keys, keys, strict=True):
                room[stretch.first : stretch.stop] = one.detach()

    def groups(self, layout: PartLayout, kind: str) -> Iterator[Group]:
        """What earlier parts hold here of what continues, in order, a group at a time."""
        stretch = layout.earlier.get(kind)
        if stretch is not None:
            yield Group(stretch, self.of(stretch))

    def of(self, stretch: Stretch) -> tuple[torch.Tensor, ...]:
        """What is kept of a stretch."""
        return tuple(one[stretch.first : stretch.stop] for one in self._of[stretch.key].keys)

    def add(self, stretch: Stretch, *gradients: torch.Tensor) -> None:
        """Adds to the gradients of what `of` has returned."""
        kept = self._of[stretch.key]
        if not kept.gradients:
            kept.gradients = tuple(
                torch.zeros_like(one, dtype=self._sum_type(one)) for one in kept.keys
            )
        kept.found_for = stretch.stop
        for total, gradient in zip(kept.gradients, gradients, strict=True):
            total[stretch.first : stretch.stop] += gradient

    def take(self, stretch: Stretch) -> tuple[torch.Tensor, ...]:
        """What later parts have found for a stretch, which nobody needs again.

        Raises:
            RuntimeError: the part behind has not run backward just before.
        """
        kept = self._of[stretch.key]
        self.require_order(kept.found_for, stretch)
        if stretch.first == 0:
            del self._of[stretch.key]
        return tuple(one[stretch.first : stretch.stop] for one in kept.gradients)

    @staticmethod
    def require_order(found_for: int, stretch: Stretch) -> None:
        """Raises RuntimeError unless the part behind has found gradients last."""
        if found_for != stretch.stop:
            raise RuntimeError(
                "parts run backward in another order than from the last to the first: expected "
                f"gradients of {stretch.stop} tokens of a sequence, found {found_for}"
            )

    def add_found(self, layout: PartLayout, *gradients: torch.Tensor) -> None:
        """Adds, in place, what later parts found for the keys of this one."""
        for kind, stretch in layout.kept.items():
            rows = layout.last_rows(kind)
            for gradient, found in zip(gradients, self.take(stretch), strict=True):
                gradient[rows] += found


def part_layouts(
    ring: tuple[int, ...],
    index: int,
    parts: Sequence[tuple[tuple[int, ...], tuple[int, ...], bool, bool, int]],
    device: torch.device,
    is_stream: bool = False,
) -> list[PartLayout]:
    """The layouts of a micro-batch's parts.

    Args:
        ring: as of `TokenLayout`, and so are `index` and `device`.
        index: likewise.
        device: likewise.
        parts: of each its ring slices and its whole sequences, whether the first of either
            continues what the part before ends with, and its padding.
        is_stream: as of `PartLayout`.
    """
    sequences: dict[str, list[list[tuple[int, int]]]] = {RING: [], LOCAL: []}
    for number, (slices, lengths, continues_ring, continues_local, padding) in enumerate(parts):
        for kind, sizes, continues in (
            (RING, slices, continues_ring),
            (LOCAL, lengths[: len(lengths) - bool(padding)], continues_local),
        ):
            for place, size in enumerate(sizes):
                if place > 0 or not continues:
                    sequences[kind].append([])
                sequences[kind][-1].append((number, size))
    earlier: list[dict[str, Stretch]] = [{} for _ in parts]
    kept: list[dict[str, Stretch]] = [{} for _ in parts]
    for kind, found in sequences.items():
        for pieces in found:
            key, first = (kind, pieces[0][0]), 0
            total = sum(size for _, size in pieces[:-1])
            for number, size in pieces:
                if first > 0:
                    earlier[number][kind] = Stretch(key, 0, first, total)
                if first < total:
                    kept[number][kind] = Stretch(key, first, first + size, total)
                first += size
    whole = {
        kind: tuple(sum(size for _, size in pieces) for pieces in found)
        for kind, found in sequences.items()
    }
    return [
        PartLayout(
            ring=ring,
            index=index,
            ring_slices=slices,
            local_lengths=lengths,
            device=device,
            earlier=earlier[number],
            kept=kept[number],
            padding=padding,
            whole_slices=whole[RING],
            whole_longest=max(whole[LOCAL], default=0),
            is_stream=is_stream,
        )
        for number, (slices, lengths, _, _, padding) in enumerate(parts)
    ]
