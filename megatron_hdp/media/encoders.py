"""Encoders of images, videos and sound by their shapes: patches of an item, FLOP of a patch.

A picture is resized, then cut into patches; ``merge`` x ``merge`` of them become a row of the
language model's sequence. Numbers are those of the models' published configurations.
"""

from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import Int64Array

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
        (count,) = self.patches_of(np.array([height]), np.array([width]), num_frames)
        return int(count), -(-num_frames // self.frames_per_patch)

    def patches_of(
        self, heights: Int64Array, widths: Int64Array, num_frames: int = 1
    ) -> Int64Array:
        """Return the patches of an item of each size, ``[sizes]``; as `patches`."""
        sides = self.resized(heights, widths, num_frames)
        if self.square is not None:
            return np.full(len(heights), (self.square // self.patch) ** 2)
        found: Int64Array = np.prod([side // self.patch for side in sides], axis=0)
        return found

    def resized(
        self, heights: Int64Array, widths: Int64Array, num_frames: int = 1
    ) -> tuple[Int64Array, Int64Array]:
        """Return the heights and widths that pictures are resized to, before they are cropped.

        Raises:
            ValueError: as of `patches`; gives the first such size.
        """
        least, most = np.minimum(heights, widths), np.maximum(heights, widths)
        if min(least.min(initial=1), num_frames) < 1:
            i = int(np.argmin(least))
            raise ValueError(
                f"found {heights[i]} x {widths[i]} pixels and {num_frames} frames, expected 1 or "
                "more"
            )
        if self.square is not None:
            if self.is_cropped:
                return self.square * heights // least, self.square * widths // least
            return np.full(len(heights), self.square), np.full(len(heights), self.square)
        if (is_far := most > _MOST_ASPECT * least).any():
            i = int(np.argmax(is_far))
            raise ValueError(
                f"found {heights[i]} x {widths[i]} pixels, expected one side at most "
                f"{_MOST_ASPECT} times the other: crop the picture, or leave it out"
            )
        limits = self.images if num_frames == 1 else self.videos
        frames = num_frames if limits.of_all_frames else 1
        sides = self._sides(np.stack([heights, widths]), frames, limits)
        return sides[0], sides[1]

    def _sides(self, sides: Int64Array, frames: int, limits: Limits) -> Int64Array:
        """Sides, ``[2, sizes]``, in the arithmetic of the processors, step by step."""
        unit = self.patch * self.merge
        if frames > 1:
            scale = np.where(sides.min(axis=0) < unit, np.max(unit / sides, axis=0), 1.0)
            sides = (sides * scale).astype(np.int64)
        pixels = frames * sides[0] * sides[1]
        found = np.rint(sides / unit) * unit
        whole = round(frames / self.frames_per_patch) * self.frames_per_patch if frames > 1 else 1
        of_found = whole * found[0] * found[1]
        smaller = np.floor(sides / np.sqrt(pixels / limits.most) / unit) * unit
        larger = np.ceil(sides * np.sqrt(limits.least / pixels) / unit) * unit
        found = np.where(of_found < limits.least, larger, found)
        found = np.where(of_found > limits.most, np.maximum(smaller, unit), found)
        return found.astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Windows(Resizing):
    """How an encoder hears: a sound is as a picture of height 1, a frame of 10 ms wide each.

    A convolution of stride 2 makes states of frames, its patches; two neighbours become a row.
    """

    patch: int = 1
    merge: int = 1
    most_frames: int = 3000
    """Of a window; of a longer sound the first ones are heard."""
    stride: int = 2
    pooled: int = 2

    def patches_of(
        self, heights: Int64Array, widths: Int64Array, num_frames: int = 1
    ) -> Int64Array:
        """Return the states of sounds that become rows, ``[sizes]``.

        Args:
            heights: 1 each.
            widths: frames of each.
            num_frames: 1.

        Raises:
            ValueError: what is no sound, or too short for a row; gives the first one.
        """
        found = self.states(widths) // self.pooled * self.pooled
        if num_frames != 1 or (is_wrong := (heights != 1) | (found < 1)).any():
            i = int(np.argmax(is_wrong)) if num_frames == 1 else 0
            raise ValueError(
                f"found a sound of {heights[i]} x {widths[i]} frames of 10 ms, expected 1 x "
                f"{self.stride + 1} or more"
            )
        return found

    def states(self, frames: Int64Array) -> Int64Array:
        """Return the states behind the convolutions, as `transformers` counts them."""
        found: Int64Array = (np.minimum(frames, self.most_frames) - 1) // self.stride + 1
        return found

    def seen(self, frames: int) -> int:
        """Return the frames that the states of a sound depend on: its own, and one of silence."""
        (states,) = self.states(np.array([frames]))
        return min(self.stride * int(states) + 1, self.most_frames)


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
    values: int
    """Numbers of a patch, from which the first matrix makes its state."""
    is_rms: bool = False
    """Whether norms are those by the root of the mean square, made of single operations."""
    attended: int = 5
    """How many times a patch's state backward needs in attention. Queries, keys, values, what comes
    of them, and once more where that is put in another order."""
    activations: int = 2
    """Of a patch's numbers inside of an MLP, how many times as many backward needs."""
    has_class_token: bool = False
    """Whether a token of the whole picture runs through the layers beside its patches."""
    pooled: int = 1
    """States behind the layers whose mean is projected, where they are not laid side by side."""
    projected_layers: int = 1
    """Layers whose states are projected side by side."""
    projector_hidden: int | None = None
    """Between a projector's two matrices; None: as many as it is given, 0: it is one matrix."""
    projector_norm: bool = True
    """Whether a projector begins with a norm."""
    projectors: int = 1
    """Times that rows are projected: once, and once for each further level (deepstack)."""
    row_hidden: int = 4096
    """The language model's hidden size."""

    @property
    def patches_per_row(self) -> int:
        """Patches that become one row."""
        return self.resizing.merge**2 * self.pooled

    @property
    def whole_layers(self) -> int:
        """Layers whose attention grows with the square of an item."""
        return self.layers if self.global_layers is None else self.global_layers

    @property
    def tokens_per_patch(self) -> float:
        """What runs through the layers for each patch: 1, or more with a token of the whole."""
        if not self.has_class_token:
            return 1.0
        assert self.resizing.square is not None, "pictures of one size have such a token"
        return 1 + (self.resizing.patch / self.resizing.square) ** 2

    @property
    def projector_widths(self) -> tuple[int, int]:
        """Numbers that a projector is given of a row, and those between its matrices."""
        given = self.hidden * self.resizing.merge**2 * self.projected_layers
        return given, given if self.projector_hidden is None else self.projector_hidden

    def flop(self) -> tuple[float, float]:
        """Return the forward's FLOP per patch, and per patch^2 of an item."""
        tower, quadratic = self._tower_flop()
        return tower + self._projector_flop(), quadratic

    def training_flop(
        self, patches: Int64Array, *, tower: bool = True, projector: bool = True
    ) -> float:
        """Return the FLOP of items of so many patches, encoded once and differentiated.

        Each product counts once forward and twice backward, but for what has no gradient: pixels,
        and all of them where nothing before or in them is trained.

        Args:
            patches: of each item, ``[items]``.
            tower: whether the layers are trained.
            projector: whether what makes rows of their states is.
        """
        (linear, quadratic), of_projector = self._tower_flop(), self._projector_flop()
        per_patch = (3 if tower else 1) * linear - tower * 2.0 * self.values * self.hidden
        per_patch += (1 + (tower or projector) + projector) * of_projector
        per_square, n = (3 if tower else 1) * quadratic, patches.astype(np.float64)
        return float((per_patch * n + per_square * n**2).sum())

    def kept_bytes(self, value_bytes: int) -> float:
        """Return the bytes of a patch that backward needs of a forward.

        Statistics of norms and of softmax aside.

        Args:
            value_bytes: of a number.
        """
        norms = 2 * self.hidden * 2 * value_bytes  # what they are given, and give to a matrix
        if self.is_rms:  # in float32, and scaled
            norms += 2 * self.hidden * max(4, value_bytes)
        attention = self.attended * self.hidden * value_bytes
        layer = norms + attention + self.activations * self.ffn * value_bytes
        given, between = self.projector_widths
        rows = self.projectors * (given + 2 * between) / self.patches_per_row + self.values
        rows += self.projector_norm * self.hidden  # of one: the others' are the next layers', too
        return self.layers * layer * self.tokens_per_patch + rows * value_bytes

    def gathered_bytes(self, value_bytes: int) -> int:
        """Return the bytes of a patch on another rank of its item: keys and values of all layers.

        Args:
            value_bytes: of a number.
        """
        return 2 * self.hidden * self.whole_layers * value_bytes

    def working_bytes(self, value_bytes: int) -> float:
        """Return the bytes of a patch that a layer's backward needs besides, at most.

        Args:
            value_bytes: of a number.
        """
        return (self.ffn + 2 * self.hidden) * value_bytes * self.tokens_per_patch

    def _tower_flop(self) -> tuple[float, float]:
        each = self.tokens_per_patch
        matrices = 4 * self.hidden**2 + (3 if self.gated else 2) * self.hidden * self.ffn
        windows = (self.layers - self.whole_layers) * 4 * self.hidden * self.window_patches
        linear = 2 * (self.values * self.hidden + self.layers * matrices * each) + windows
        return float(linear), 4.0 * self.whole_layers * self.hidden * each**2

    def _projector_flop(self) -> float:
        given, between = self.projector_widths
        weights = given * (between or self.row_hidden) + between * self.row_hidden
        return 2.0 * self.projectors * weights / self.patches_per_row


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
        values=1536,
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
        is_rms=True,
        activations=4,
        global_layers=4,
        window_patches=64,
        values=1176,
    ),
    "clip-l-336": Encoder(
        resizing=Resizing(patch=14, merge=1, square=336, is_cropped=True),
        layers=24,
        hidden=1024,
        ffn=4096,
        values=588,
        attended=4,
        has_class_token=True,
        activations=3,
        projector_hidden=4096,
        projector_norm=False,
    ),
    "siglip-so400m-384": Encoder(
        resizing=Resizing(patch=14, merge=1, square=384),
        layers=27,
        hidden=1152,
        ffn=4304,
        values=588,
        attended=4,
        projector_hidden=4096,
        projector_norm=False,
    ),
    "qwen2-audio": Encoder(
        resizing=Windows(),
        layers=32,
        hidden=1280,
        ffn=5120,
        values=3 * (2 * 128 + 1280),  # of both convolutions, for a state
        pooled=2,
        projector_hidden=0,
        projector_norm=False,
    ),
}
"""By the names of the models that have them."""
