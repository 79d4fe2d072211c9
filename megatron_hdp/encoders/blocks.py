"""Attention of patches to those of their own image or window, and where they stand in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as functional

Grid = tuple[int, int, int]
Gather = Callable[[torch.Tensor], torch.Tensor]
"""Of ``[2, n, heads, d]`` of one member of an item that is cut those of all, ``[2, all, ...]``."""


class Blocks:
    """Which neighbouring patches attend to each other; those of equal size in one call.

    Args:
        lengths: patches of each block, one behind another.
        device: of the patches.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        of_length: dict[int, list[int]] = {}
        begin = 0
        for length in lengths:
            of_length.setdefault(length, []).append(begin)
            begin += length
        self._sizes = [(len(starts), length) for length, starts in of_length.items()]
        self._order = self._back = None
        if len(of_length) > 1:
            places = [
                (torch.tensor(starts)[:, None] + torch.arange(length)).flatten()
                for length, starts in of_length.items()
            ]
            order = torch.cat(places)
            self._order, self._back = order.to(device), order.argsort().to(device)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Softmax attention, ``[n, heads, d]`` each, to ``[n, heads * d]``."""
        given = torch.stack((query, key, value))
        if self._order is not None:
            given = given[:, self._order]
        found, begin = [], 0
        for count, length in self._sizes:
            here = given[:, begin : begin + count * length]
            begin += count * length
            q, k, v = here.unflatten(1, (count, length)).transpose(2, 3)
            out = functional.scaled_dot_product_attention(q, k, v)
            found.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
        whole = torch.cat(found)
        return whole if self._back is None else whole[self._back]


class CutBlock:
    """A block of which several ranks have some patches each: these attend to those of all.

    Args:
        gather: keys and values of all.
    """

    def __init__(self, gather: Gather) -> None:
        self._gather = gather

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """As of `Blocks`, of this rank's patches."""
        of_all = self._gather(torch.stack((key, value)))
        q, k, v = (one.transpose(0, 1)[None] for one in (query, *of_all))
        out = functional.scaled_dot_product_attention(q, k, v)
        return out[0].transpose(0, 1).flatten(1)


def frames_of(grids: Sequence[Grid]) -> list[int]:
    """Patches of each temporal patch: it attends to itself alone."""
    return [h * w for t, h, w in grids for _ in range(t)]


def places_of(grids: Sequence[Grid], merge: int) -> torch.Tensor:
    """Line and column of each patch in its grid, ``[2, n]``, in the order of `Patches`."""
    found = []
    for t, h, w in grids:
        lines, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        cells = torch.stack((lines, columns)).reshape(2, h // merge, merge, w // merge, merge)
        found.append(cells.transpose(2, 3).reshape(2, -1).repeat(1, t))
    return torch.cat(found, dim=1)


class Rotation:
    """Half of a head's channels turn by a patch's line, half by its column.

    Args:
        places: of patches, ``[2, n]``.
        channels: of a head, a multiple of 4.
        base: of the frequencies.
        like: a tensor of the device and the type of queries and keys.
    """

    def __init__(
        self, places: torch.Tensor, channels: int, base: float, like: torch.Tensor
    ) -> None:
        dtype, half = wide(like.dtype), channels // 2
        frequencies = base ** -(torch.arange(0, half, 2, dtype=dtype) / half)
        angles = (places[..., None].to(dtype) * frequencies).to(like.device)  # [2, n, d / 4]
        turned = angles.transpose(0, 1).flatten(1)[:, None]
        self._cos, self._sin = turned.cos(), turned.sin()

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        """Turned queries or keys, ``[n, heads, d]``."""
        first, second = given.to(self._cos.dtype).chunk(2, dim=-1)
        turned = (
            first * self._cos - second * self._sin,
            second * self._cos + first * self._sin,
        )
        return torch.cat(turned, dim=-1).to(given.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type of what must not be rounded to 16 bits."""
    return torch.promote_types(dtype, torch.float32)
