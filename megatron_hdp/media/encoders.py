"""Encoders of images and videos by their shapes: patches of a picture, FLOP of a patch.

A picture is resized, then cut into patches; ``merge`` x ``merge`` of them become a row of the
language model's sequence. Numbers are those of the models' published configurations.
"""

import math
from dataclasses import dataclass

_MOST_ASPECT = 200


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Pixels, height x width, that a picture is resized to."""

    least: int
    most: int
    of_all_frames: bool = False
    """Whether they are a whole video's, not each frame's."""


@dataclass(frozen=True, kw_only=True)
class Resizing:
    """How an encoder's processor resizes; sizes in pixels.

    With `square` each picture becomes one of so many pixels a side, stretched or cropped. Else
    sides become multiples of patch x merge, near their old ones, within the limits, as Qwen's
    processors do it.
    """

    patch: int
    merge: int
    frames_per_patch: int = 1
    """Of a video; its last frame is repeated where it has no such multiple."""
    square: int | None = None
    is_cropped: bool = False
    """Whether the shorter side gets a square's pixels, and its middle is taken."""
    images: Limits = Limits(least=1, most=2**40)
    videos: Limits = Limits(least=1, most=2**40)

    def patches(self, height: int, width: int, num_frames: int = 1) -> tuple[int, int]:
        """Return the patches of an item, and the number of items: a video's temporal patches.

        Args:
            height: in pixels, above 0.
            width: likewise.
            num_frames: 1 for an image.

        Raises:
            ValueError: a size that is none, or sides too far apart.
        """
        sides = self.resized(height, width, num_frames)
        if self.square is not None:
            sides = self.square, self.square
        items = -(-num_frames // self.frames_per_patch)
        return math.prod(side // self.patch for side in sides), items

    def resized(self, height: int, width: int, num_frames: int = 1) -> tuple[int, int]:
        """Return the height and width that a picture is resized to, before it is cropped.

        Raises:
            ValueError: as of `patches`.
        """
        if min(height, width, num_frames) < 1:
            raise ValueError(
                f"found {height} x {width} pixels and {num_frames} frames, expected 1 or more"
            )
        if self.square is not None:
            if not self.is_cropped:
                return self.square, self.square
            short = min(height, width)
            return self.square * height // short, self.square * width // short
        if max(height, width) > _MOST_ASPECT * min(height, width):
            raise ValueError(
                f"found {height} x {width} pixels, expected one side at most {_MOST_ASPECT} times "
                "the other: crop the picture, or leave it out"
            )
        limits = self.images if num_frames == 1 else self.videos
        frames = num_frames if limits.of_all_frames else 1
        return self._sides(height, width, frames, limits)

    def _sides(self, height: int, width: int, frames: int, limits: Limits) -> tuple[int, int]:
        unit = self.patch * self.merge
        if frames > 1 and min(height, width) < unit:
            scale = max(unit / height, unit / width)
            height, width = int(height * scale), int(width * scale)
        sides = [round(side / unit) * unit for side in (height, width)]
        whole = round(frames / self.frames_per_patch) * self.frames_per_patch if frames > 1 else 1
        if whole * math.prod(sides) > limits.most:
            shrink = math.sqrt(frames * height * width / limits.most)
            sides = [max(unit, math.floor(s / shrink / unit) * unit) for s in (height, width)]
        elif whole * math.prod(sides) < limits.least:
            grow = math.sqrt(limits.least / (frames * height * width))
            sides = [math.ceil(side * grow / unit) * unit for side in (height, width)]
        return sides[0], sides[1]


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A transformer over patches, and what makes rows of them."""

    resizing: Resizing
    layers: int
    hidden: int
    ffn: int
    gated: bool = False
    global_layers: int | None = None
    """Layers in which all patches of an item attend to each other; None: all."""
    window_patches: int = 0
    """Patches that attend to each other in the other layers."""
    projectors: int = 1
    """Times that rows are projected: once, and once for each further level (deepstack)."""
    row_hidden: int = 4096
    """The language model's hidden size."""

    @property
    def patches_per_row(self) -> int:
        """Patches that become one row."""
        return self.resizing.merge**2

    @property
    def whole_layers(self) -> int:
        """Layers whose attention grows with the square of an item."""
        return self.layers if self.global_layers is None else self.global_layers

    def flop(self) -> tuple[float, float]:
        """Return the forward's FLOP per patch, and per patch^2 of an item."""
        matrices = 4 * self.hidden**2 + (3 if self.gated else 2) * self.hidden * self.ffn
        merged = self.patches_per_row * self.hidden
        projector = (merged**2 + merged * self.row_hidden) / self.patches_per_row
        windows = (self.layers - self.whole_layers) * 4 * self.hidden * self.window_patches
        linear = 2 * (self.layers * matrices + self.projectors * projector) + windows
        return float(linear), 4.0 * self.whole_layers * self.hidden


ENCODERS = {
    "qwen3-vl": Encoder(
        resizing=Resizing(
            patch=16,
            merge=2,
            frames_per_patch=2,
            images=Limits(least=65_536, most=16_777_216),
            videos=Limits(least=4_096, most=25_165_824, of_all_frames=True),
        ),
        layers=27,
        hidden=1152,
        ffn=4304,
        projectors=4,
    ),
    "qwen2.5-vl": Encoder(
        resizing=Resizing(
            patch=14,
            merge=2,
            frames_per_patch=2,
            images=Limits(least=3_136, most=12_845_056),
            videos=Limits(least=100_352, most=602_112),
        ),
        layers=32,
        hidden=1280,
        ffn=3420,
        gated=True,
        global_layers=4,
        window_patches=64,
    ),
    "clip-l-336": Encoder(
        resizing=Resizing(patch=14, merge=1, square=336, is_cropped=True),
        layers=24,
        hidden=1024,
        ffn=4096,
    ),
    "siglip-so400m-384": Encoder(
        resizing=Resizing(patch=14, merge=1, square=384), layers=27, hidden=1152, ffn=4304
    ),
}
"""By the names of the models that have them."""
