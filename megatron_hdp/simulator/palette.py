"""Colours of pictures of plans: one for every ring degree, from light (1 rank) to dark (all)."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from megatron_hdp.arrays import Float64Array, Int64Array

IDLE = "#e4e4e4"
LOCAL = "#f28e2b"
MAKESPAN = "#c0392b"

# ColorBrewer's YlGnBu without its two lightest colours, which would vanish beside IDLE
_RAMP = ("#c7e9b4", "#7fcdbb", "#41b6c4", "#1d91c0", "#225ea8", "#253494", "#081d58")
_MAX_GROUPS = 8
_FORWARD_STRENGTH = 0.5  # of a colour; the rest is white
_LUMINANCE = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Palette:
    """A colour for every group of ring degrees."""

    groups: tuple[tuple[int, int], ...]
    """Least and most degree of each colour."""
    colours: tuple[str, ...]

    @classmethod
    def of_degrees(cls, degrees: Int64Array, num_ranks: int) -> Self:
        """Give each degree its colour, or each power of two when there are many degrees.

        One rank is always light and all ranks are always dark, so that plans can be compared.
        """
        present = np.unique(degrees)
        classes = np.arange(len(present))
        if len(present) > _MAX_GROUPS:
            classes = np.ceil(np.log2(present)).astype(np.int64)
        groups = [present[classes == c] for c in np.unique(classes)]
        shades = _shades(int(present[0]), int(present[-1]), num_ranks, len(groups))
        return cls(
            groups=tuple((int(group[0]), int(group[-1])) for group in groups),
            colours=tuple(map(_on_ramp, shades.tolist())),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """What a legend calls each colour."""
        return tuple(
            f"degree {least}" if least == most else f"degree {least} to {most}"
            for least, most in self.groups
        )

    def index(self, degree: int) -> int:
        """Return the colour of a degree."""
        return next(i for i, (_, most) in enumerate(self.groups) if degree <= most)


def pale(colour: str) -> str:
    """Return the colour of a forward: its backward's, mixed with white."""
    return _text(255 - _FORWARD_STRENGTH * (255 - _parts(colour)))


def is_dark(colour: str) -> bool:
    """Return whether text on this colour should be white."""
    return float(np.dot(_parts(colour), _LUMINANCE)) < 0.5 * 255


def _shades(least: int, most: int, num_ranks: int, number: int) -> Float64Array:
    """Return `number` shades between those of two degrees, far enough apart to be told apart."""
    first, last = np.log2([least, most]) / np.log2(max(num_ranks, 2))
    room = 0.14 * (number - 1)
    last = max(last, min(1.0, first + room))
    return np.linspace(max(0.0, min(first, last - room)), last, number)


def _on_ramp(shade: float) -> str:
    stops = np.linspace(0.0, 1.0, len(_RAMP))
    parts = np.array([_parts(colour) for colour in _RAMP])
    return _text(np.array([np.interp(shade, stops, parts[:, i]) for i in range(3)]))


def _parts(colour: str) -> Float64Array:
    """Red, green and blue, 0 to 255."""
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], dtype=np.float64)


def _text(parts: Float64Array) -> str:
    return "#" + "".join(f"{round(part):02x}" for part in parts.tolist())
