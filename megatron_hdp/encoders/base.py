"""What encoders share: pixels, settings, and the protocol that a session knows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import torch

from megatron_hdp.arrays import Int64Array
from megatron_hdp.encoders.blocks import Gather, Grid
from megatron_hdp.media import PATCHES_PER_PACK, Encoder, ItemCostModel, MRope, Patches, RowGrid

CHANNELS = 3
MOST_RANKS = 8
"""That encode one item together."""
_VALUES = 256  # of a byte


@dataclass(frozen=True)
class Pixels:
    """How bytes become numbers: ``(byte * scale - mean) / std``, by colour.

    Each step is rounded as the processors of `transformers` round it that use Pillow.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 1 / 255

    @cached_property
    def table(self) -> torch.Tensor:
        """float32 ``[colours, 256]``: the number of each byte."""
        scaled = (np.arange(_VALUES, dtype=np.float64) * self.scale).astype(np.float32)
        mean, std = (np.array(one, dtype=np.float32)[:, None] for one in (self.mean, self.std))
        return torch.from_numpy((scaled - mean) / std)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Numbers of patches, ``[n, colours * values]``; floating-point ones are so already."""
        if values.is_floating_point():
            return values
        colours = len(self.mean)
        table = self.table.to(values.device)
        first = torch.arange(colours, device=values.device)[:, None] * _VALUES
        of_colours = values.reshape(len(values), colours, -1).long() + first
        return table.reshape(-1)[of_colours].reshape(values.shape)


CLIP_PIXELS = Pixels((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALF_PIXELS = Pixels((0.5,) * CHANNELS, (0.5,) * CHANNELS)


@dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """Of an encoder's configuration; what it leaves out is as `transformers` has it."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Takes those that are known from a configuration."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: config[name] for name in names & set(config)})


class ItemEncoder(torch.nn.Module, ABC):
    """An encoder as `HdpSession.attach_encoder` takes it, with the weights of a model's files.

    Args:
        config: the model's ``config.json``.
        patches_per_pack: the most patches of items that are given to one call.

    Attributes:
        patches_per_pack: the most patches of a call.
        shape: by which its cost is computed.
        levels: 1, and one for each further level of rows (deepstack).
        positions: how the language model's rotary positions see rows; None: like tokens.

    Raises:
        ValueError: it drops values by chance, so that no rows would be made twice.
    """

    prefixes: ClassVar[Mapping[str, str]]
    """How names of tensors in Hugging Face's files begin, and what stands there in this one's."""
    projectors: ClassVar[tuple[str, ...]]
    """How names of weights begin, in this one, that make rows of the layers' states."""
    shape: Encoder
    levels = 1
    positions: MRope | None = None
    measured: ItemCostModel | None = None
    """What its items cost while it is trained; None: not known."""

    def __init__(self, config: Mapping[str, Any], patches_per_pack: int = PATCHES_PER_PACK) -> None:
        super().__init__()
        self.patches_per_pack = patches_per_pack
        for part in ("vision_config", "audio_config"):
            for name, value in config.get(part, {}).items():
                if name.endswith(("dropout", "layerdrop")) and value:
                    raise ValueError(
                        f"found {name} {value} in the {part}, expected 0: an item is encoded twice "
                        "and must give the same rows"
                    )

    @property
    def patches_per_row(self) -> int:
        """Patches that become one row."""
        return self.shape.patches_per_row

    @property
    def cost(self) -> ItemCostModel:
        """As it was measured, else by its shape."""
        is_trained = any(self.trained_parts)
        if self.measured is None:
            return ItemCostModel.from_encoder(self.shape, is_trained=is_trained)
        return self.measured if is_trained else self.measured.frozen()

    @abstractmethod
    def samples(self) -> list[Any]:
        """Blank items of several sizes, to measure what they cost, the smallest first."""

    @property
    def trained_parts(self) -> tuple[bool, bool]:
        """Whether some weight of its layers is trained, and some of its projectors."""
        found = [False, False]
        for name, weight in self.named_parameters():
            found[name.startswith(self.projectors)] |= weight.requires_grad
        return found[0], found[1]

    def training_flop(self, patches: Int64Array) -> float:
        """FLOP of items of so many patches, ``[items]``, forward and backward."""
        tower, projector = self.trained_parts
        return self.shape.training_flop(patches, tower=tower, projector=projector)

    def most_ranks(self, items: Sequence[Any]) -> int:
        """The most ranks that may encode one of these together: 1, if it cannot be cut."""
        return 1

    @staticmethod
    def _require_kind(item: Any, attribute: str, expected: str) -> None:
        """Refuses what has not what this encoder's items have."""
        if not hasattr(item, attribute):
            raise ValueError(
                f"found a {type(item).__name__}, expected {expected}: give its source the encoder "
                "that is trained (media: encoder)"
            )


class PatchEncoder(ItemEncoder):
    """An encoder of `Patches`.

    Args:
        config: the model's ``config.json``.
        pixels: how bytes are normalised; by default as the model's processor does it.
        patches_per_pack: the most patches of items that are given to one call.

    Attributes:
        pixels: how it normalises bytes.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        pixels: Pixels | None = None,
        patches_per_pack: int = PATCHES_PER_PACK,
    ) -> None:
        super().__init__(config, patches_per_pack)
        self.pixels = pixels or self.usual_pixels(config)

    def samples(self) -> list[Any]:
        """Squares with sides of two patches and more, or the one size that it takes."""
        resizing = self.shape.resizing
        sides = [resizing.merge * 2**i for i in range(1, 8)]
        if resizing.square is not None:
            sides = [resizing.square // resizing.patch]
        return [
            Patches(np.zeros((side**2, self._values), dtype=np.uint8), (1, side, side))
            for side in sides
        ]

    @staticmethod
    def usual_pixels(config: Mapping[str, Any]) -> Pixels:
        """How a model's processor normalises bytes, if nothing else is said."""
        return CLIP_PIXELS

    def patches(self, item: Patches) -> int:
        """Patches of an item.

        Raises:
            ValueError: its patches are not of the encoder's size, or no rows can be made of them.
        """
        self._require(item)
        return len(item.values)

    def grid(self, item: Patches) -> RowGrid:
        """An item's rows in time, height and width."""
        t, h, w = item.grid
        merge = self.shape.resizing.merge
        return RowGrid(t, h // merge, w // merge)

    def forward(self, items: Sequence[Patches]) -> torch.Tensor:
        """Rows of items, one behind another, ``[rows, levels * hidden]``."""
        numbers = torch.cat([self._numbers(one.values) for one in items])
        return self.encoded(numbers, [one.grid for one in items])

    def _numbers(self, values: Any) -> torch.Tensor:
        """Normalised patches, ``[n, colours * frames * pixels]``."""
        weight = next(self.parameters())
        found = torch.from_numpy(np.ascontiguousarray(values)).to(weight.device)
        return self._frames(self.pixels.of(found)).to(weight.dtype)

    @abstractmethod
    def encoded(self, patches: torch.Tensor, grids: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Rows of normalised patches, ``[n, colours * frames * pixels]``."""

    def _frames(self, numbers: torch.Tensor) -> torch.Tensor:
        """A picture's patches, repeated for each frame of a temporal patch."""
        frames = self.shape.resizing.frames_per_patch
        if numbers.shape[1] == frames * self._values:
            return numbers
        of_colours = numbers.reshape(len(numbers), CHANNELS, 1, -1)
        return of_colours.expand(-1, -1, frames, -1).reshape(len(numbers), -1)

    @property
    def _values(self) -> int:
        return CHANNELS * self.shape.resizing.patch**2

    def _require(self, item: Patches) -> None:
        self._require_kind(item, "grid", "a picture or a video")
        resizing = self.shape.resizing
        found, expected = item.values.shape[1], {self._values * n for n in (1, self._most_frames)}
        if found not in expected:
            raise ValueError(
                f"found patches of {found} values, expected "
                f"{' or '.join(map(str, sorted(expected)))}, "
                f"as for {resizing.patch} x {resizing.patch} pixels: cut pictures by the "
                "encoder's settings"
            )
        if any(side % resizing.merge for side in item.grid[1:]):
            raise ValueError(
                f"found a grid of {' x '.join(map(str, item.grid))} patches, expected height and "
                f"width to be multiples of {resizing.merge}: resize the picture for it"
            )

    @property
    def _most_frames(self) -> int:
        return self.shape.resizing.frames_per_patch


class CutEncoder(PatchEncoder):
    """One whose items several ranks may encode together, cut between rows."""

    def most_ranks(self, items: Sequence[Patches]) -> int:
        """More than one, unless an item has patches that do not see all others."""
        return MOST_RANKS if all(one.grid[0] == 1 for one in items) else 1

    def rows_of_pieces(self, item: Patches, degree: int) -> list[Int64Array]:
        """The rows that each of so many ranks makes of an item, in the order of its pieces."""
        rows = np.arange(len(item.values) // self.patches_per_row)
        return np.array_split(rows, degree)

    def encode_piece(self, item: Patches, degree: int, member: int, gather: Gather) -> torch.Tensor:
        """The rows of one piece, ``[rows, levels * hidden]``; all members must call it.

        Args:
            item: that is cut.
            degree: ranks that encode it.
            member: which of them this one is.
            gather: gives keys and values of all members.
        """
        rows = self.rows_of_pieces(item, degree)[member]
        values = np.asarray(item.values)
        values = values.reshape(-1, self.patches_per_row, values.shape[1])[rows]
        patches = self._numbers(values.reshape(-1, values.shape[-1]))
        return self._encoded_piece(patches, item.grid, torch.from_numpy(rows), gather)

    @abstractmethod
    def _encoded_piece(
        self, patches: torch.Tensor, grid: Grid, rows: torch.Tensor, gather: Gather
    ) -> torch.Tensor:
        """Rows with these numbers, of their normalised patches."""


def mrope_of(
    config: Mapping[str, Any], sections: tuple[int, int, int], *, is_interleaved: bool
) -> MRope:
    """What a ``config.json`` says of rotary positions of its language model; else `sections`."""
    text = config.get("text_config", config)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    t, h, w = rope.get("mrope_section", sections)
    return MRope((t, h, w), is_interleaved)
