"""Files of sizes: the pictures and videos of a step, whose patches are counted."""

from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.cli.shared.numbers import lines_of, pieces, shown
from megatron_hdp.media import Resizing, Windows

FORM = "HEIGHT WIDTH [FRAMES]"


@dataclass(frozen=True)
class Sizes:
    """What a file of sizes holds."""

    patches: Int64Array
    """Of each item, ``[items]``."""
    num_images: int
    """Or of sounds."""
    num_videos: int
    of_sounds: bool

    @property
    def counts(self) -> str:
        """How many there are of what."""
        if self.of_sounds:
            return f"{self.num_images:,} sounds"
        return f"{self.num_images:,} images and {self.num_videos:,} videos"

    @property
    def names(self) -> str:
        """What they are called."""
        if self.of_sounds:
            return "sounds"
        numbers = {"pictures": self.num_images, "videos": self.num_videos}
        return ", ".join(name for name, number in numbers.items() if number)


def read_sizes(path: str, resizing: Resizing) -> Sizes:
    """Return the items of a text file: ``height width [frames]`` in pixels, a picture a line.

    Args:
        path: of the file; what follows a # is left out, and empty lines.
        resizing: how an encoder's processor resizes.

    Raises:
        ValueError: a line that is none, with its number.
    """
    known: dict[tuple[int, ...], tuple[int, int]] = {}
    patches: list[int] = []
    counts = [0, 0]
    for line, text in (one for piece in pieces(path) for one in lines_of(*piece)):
        fields = text.split("#", 1)[0].split()
        if not fields:
            continue
        try:
            size = tuple(map(int, fields))
            if len(size) not in (2, 3):
                raise ValueError(f"found {len(size)} numbers, expected height, width and frames")
            if size not in known:
                known[size] = resizing.patches(*size)
        except ValueError as error:
            why = str(error) if str(error).startswith("found") else f"found {shown(text)}"
            raise ValueError(f"--items {path}, line {line}: {why}; a line is {FORM}") from None
        of_each, items = known[size]
        patches += [of_each] * items
        counts[len(size) - 2] += 1
    if not patches:
        raise ValueError(f"--items {path}: found no size, expected lines of {FORM}")
    return Sizes(
        np.array(patches, dtype=np.int64), counts[0], counts[1], isinstance(resizing, Windows)
    )
