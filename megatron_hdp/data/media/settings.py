"""What a source says of its pictures, videos or sounds: how they are read, and written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import BinaryIO, ClassVar

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.media.items import ItemSize
from megatron_hdp.data.media.sizes import MediaError, size_of_picture
from megatron_hdp.data.media.sounds import RATE, size_of_sound
from megatron_hdp.data.media.spectrograms import BINS, HOP
from megatron_hdp.data.media.videos import Sampling, VideoSize, size_of_frames, size_of_video
from megatron_hdp.data.spec import MediaSpec
from megatron_hdp.media import ENCODERS, Encoder, Limits, Resizing, Windows

DECODER = "pillow"
"""What decodes and resizes; another one would give other bits."""
_HEARING = "float32", RATE, HOP, BINS
"""What sounds become; whoever reads a file gives the same samples."""
_QWEN = "<|image_pad|>", "<|vision_start|>{}<|vision_end|>", ""
_LLAVA = "<image>", "{}", "\n"
_AUDIO, _AROUND_AUDIO = "<|AUDIO|>", "<|audio_bos|>{}<|audio_eos|>"
_VIDEO, _AROUND_VIDEO = "<|video_pad|>", "<|vision_start|>{}<|vision_end|>"
_QWEN_2_5, _QWEN_3 = "qwen2.5-vl", "qwen3-vl"
_MOST_FRAMES = 2**16 - 1  # that can be stored
_OF_PICTURES = "least_pixels", "most_pixels", "most_file_pixels"
_KEYS = {
    "pictures": _OF_PICTURES,
    "videos": (*_OF_PICTURES, "frames_per_second", "least_frames", "most_frames"),
    "sounds": ("most_seconds",),
}
"""Keys that only some kinds have."""


@dataclass(frozen=True, kw_only=True)
class MediaSettings(ABC):
    """Of one source, whose items are of one kind."""

    noun: ClassVar[str]
    """What a file, or a list of them, is called."""
    items: ClassVar[str]
    """What items are called."""
    unit: ClassVar[str]
    """What an item's height x width counts."""
    lists: ClassVar[tuple[str, str]]
    """Keys of a row under which items are named: one, and several. Those are also the kinds of
    parts that are items, the first one with ``_url`` too; between < and > it marks one in a text.
    """
    placeholder: str
    """The token that stands for an item."""

    @property
    def mark(self) -> str:
        """What stands for an item in the texts of a row."""
        return f"<{self.lists[0]}>"

    @abstractmethod
    def written(self, sizes: Sequence[ItemSize], number: int | None = None) -> str:
        """Return what a file's items are in a text.

        Args:
            sizes: of the items.
            number: where they are a part of a message, so that what follows stands behind it; its
                place among the items of its conversation, from 1 on.
        """

    @abstractmethod
    def sizes_of(self, stream: BinaryIO, name: str) -> list[ItemSize]:
        """Return the sizes of a file's items by its header: pixels, or 1 and frames of 10 ms.

        Raises:
            MediaError: it is none that is encoded, or its header is damaged.
            ModuleNotFoundError: a library for it is not installed.
        """

    @abstractmethod
    def rows(
        self, heights: Int64Array, widths: Int64Array, frames: Int64Array | int = 1
    ) -> Int64Array:
        """Return the rows of an item of each size, ``[sizes]``.

        Raises:
            ValueError: one has none, or is of no size that is encoded.
        """

    @abstractmethod
    def preparing(self) -> tuple[object, ...]:
        """Return all that decides what becomes of an item when it is prepared."""

    @abstractmethod
    def identity(self) -> tuple[object, ...]:
        """Return all that rows and values of items depend on, beside their files."""


@dataclass(frozen=True, kw_only=True)
class PictureSettings(MediaSettings):
    """Of a source with pictures."""

    noun, items, unit = "picture", "pictures", "pixels"
    lists = "image", "images"
    resizing: Resizing
    around: str
    """Is written around a placeholder."""
    behind: str
    """Is written behind a part of a message."""
    most_file_pixels: int

    @classmethod
    def of(cls, spec: MediaSpec) -> PictureSettings:
        """Return what a declaration means; see `settings_of`."""
        resizing = ENCODERS[spec.encoder].resizing
        usual, around, behind = _QWEN if spec.encoder.startswith("qwen") else _LLAVA
        least, most = spec.least_pixels, spec.most_pixels
        if (least or most) and resizing.square is not None:
            raise ValueError(
                f"found limits of pixels for {spec.encoder}, expected none: its pictures "
                f"have {resizing.square} x {resizing.square}"
            )
        placeholder = spec.placeholder or usual
        return cls(
            resizing=replace(resizing, images=_limited(resizing.images, spec)),
            placeholder=placeholder,
            around=around,
            behind=behind,
            most_file_pixels=spec.most_file_pixels,
        )

    def written(self, sizes: Sequence[ItemSize], number: int | None = None) -> str:
        """Return the same for all."""
        return self.around.format(self.placeholder) + ("" if number is None else self.behind)

    def sizes_of(self, stream: BinaryIO, name: str) -> list[ItemSize]:
        """Return height and width in pixels, upright."""
        found = size_of_picture(stream, name, most_pixels=self.most_file_pixels)
        return [ItemSize(found.height, found.width)]

    def rows(
        self, heights: Int64Array, widths: Int64Array, frames: Int64Array | int = 1
    ) -> Int64Array:
        """Return the rows of a picture of each size, ``[sizes]``."""
        return self.resizing.patches_of(heights, widths) // self.resizing.merge**2

    def preparing(self) -> tuple[object, ...]:
        """Return what stands around them, and which files are bad."""
        return self.placeholder, self.around, self.behind, self.most_file_pixels

    def identity(self) -> tuple[object, ...]:
        """Return who decodes, and how pictures are resized."""
        return DECODER, self.resizing


@dataclass(frozen=True, kw_only=True)
class VideoSettings(MediaSettings):
    """Of a source with videos, whose temporal patches are items."""

    noun, items, unit = "video", "pairs of frames", "pixels"
    lists = "video", "videos"
    resizing: Resizing
    sampling: Sampling
    is_stamped: bool
    """Whether each temporal patch stands behind the seconds at which it is shown."""
    most_file_pixels: int

    @classmethod
    def of(cls, spec: MediaSpec) -> VideoSettings:
        """Return what a declaration means; see `settings_of`."""
        if spec.encoder not in (_QWEN_2_5, _QWEN_3):
            raise ValueError(
                f"found kind: videos for {spec.encoder}, expected it for {_QWEN_2_5} or {_QWEN_3}: "
                "give frames as pictures"
            )
        resizing = ENCODERS[spec.encoder].resizing
        in_order = 2 <= spec.least_frames <= spec.most_frames <= _MOST_FRAMES
        if not spec.frames_per_second > 0 or not in_order:
            raise ValueError(
                f"found frames-per-second {spec.frames_per_second:g}, least-frames "
                f"{spec.least_frames:,} and most-frames {spec.most_frames:,}, expected some a "
                f"second, and 2 to {_MOST_FRAMES:,} frames, in order"
            )
        return cls(
            placeholder=spec.placeholder or _VIDEO,
            resizing=replace(resizing, videos=_limited(resizing.videos, spec)),
            sampling=Sampling(
                rate=spec.frames_per_second,
                least=spec.least_frames,
                most=spec.most_frames,
                is_even=spec.encoder == _QWEN_2_5,
            ),
            is_stamped=spec.encoder == _QWEN_3,
            most_file_pixels=spec.most_file_pixels,
        )

    def written(self, sizes: Sequence[ItemSize], number: int | None = None) -> str:
        """Return a placeholder for each temporal patch, as the model's processor has them."""
        if not self.is_stamped:
            return _AROUND_VIDEO.format(self.placeholder * len(sizes))
        each = _AROUND_VIDEO.format(self.placeholder)
        texts = [f"<{one.shown_at_s:.1f} seconds>{each}" for one in sizes]
        return _AROUND_VIDEO.format("".join(texts))

    def sizes_of(self, stream: BinaryIO, name: str) -> list[ItemSize]:
        """Return the sizes of the temporal patches of a file."""
        size = size_of_video(stream, name, most_pixels=self.most_file_pixels)
        return self._patches(size, self.sampling.chosen(size, name), size.rate)

    def sizes_of_frames(
        self, streams: Iterable[BinaryIO], name: str, rate: float | None
    ) -> list[ItemSize]:
        """Return the sizes of the temporal patches of a list of frames, all of which are seen.

        Args:
            streams: of the frames' files.
            name: what an error calls the list.
            rate: frames a second; None: as many as are wanted of others.

        Raises:
            MediaError: one is no frame, or they are too few or too many.
        """
        rate = rate or self.sampling.rate
        size = size_of_frames(streams, name, rate, most_pixels=self.most_file_pixels)
        if not 2 <= size.num_frames <= self.sampling.most:
            raise MediaError(
                f"{name}: found {size.num_frames:,} frames, expected 2 to "
                f"{self.sampling.most:,}: name fewer, or raise most-frames"
            )
        return self._patches(size, np.arange(size.num_frames), rate)

    def rows(
        self, heights: Int64Array, widths: Int64Array, frames: Int64Array | int = 1
    ) -> Int64Array:
        """Return the rows of a temporal patch of videos of each size, ``[sizes]``."""
        counts, found = np.broadcast_to(frames, heights.shape), np.zeros_like(heights)
        for count in np.unique(counts).tolist():
            here = counts == count
            found[here] = self.resizing.patches_of(heights[here], widths[here], count)
        return found // self.resizing.merge**2

    def preparing(self) -> tuple[object, ...]:
        """Return which frames are seen, what is written, and which files are bad."""
        return self.noun, self.placeholder, self.sampling, self.is_stamped, self.most_file_pixels

    def identity(self) -> tuple[object, ...]:
        """Return who decodes, which frames are seen, and how they are resized."""
        return DECODER, self.sampling, self.resizing

    def _patches(self, size: VideoSize, seen: Int64Array, rate: float) -> list[ItemSize]:
        each = self.resizing.frames_per_patch
        # as transformers counts: seconds of a patch by the share of frames that are seen
        seconds = each / (len(seen) / size.num_frames * rate)
        found = []
        for part in range(-(-len(seen) // each)):
            of_part = seen[each * part : each * (part + 1)].tolist()
            shown_at_s = (of_part[0] / rate + of_part[-1] / rate) / 2
            found.append(ItemSize(size.height, size.width, len(seen), part, seconds, shown_at_s))
        return found


@dataclass(frozen=True, kw_only=True)
class SoundSettings(MediaSettings):
    """Of a source with sounds."""

    noun, items, unit = "sound", "sounds", "frames"
    lists = "audio", "audios"
    windows: Windows
    most_seconds: int

    @classmethod
    def of(cls, spec: MediaSpec, windows: Windows) -> SoundSettings:
        """Return what a declaration means; see `settings_of`."""
        placeholder = spec.placeholder or _AUDIO
        return cls(
            placeholder=placeholder,
            windows=windows,
            most_seconds=spec.most_seconds,
        )

    def written(self, sizes: Sequence[ItemSize], number: int | None = None) -> str:
        """Return a part with its number, as Qwen2-Audio's template does."""
        found = _AROUND_AUDIO.format(self.placeholder)
        return found if number is None else f"Audio {number}: {found}\n"

    def sizes_of(self, stream: BinaryIO, name: str) -> list[ItemSize]:
        """Return 1, and frames of 10 ms: no more than are heard."""
        found = size_of_sound(stream, name)
        if found.num_samples > self.most_seconds * found.rate:
            raise MediaError(
                f"{name}: found a sound of {found.num_samples / found.rate:,.1f} s, expected at "
                f"most {self.most_seconds}: cut it, or leave it out; with a larger most-seconds "
                f"its first {self.windows.most_frames * HOP // RATE} s are heard"
            )
        return [ItemSize(1, min(-(-found.num_heard // HOP), self.windows.most_frames))]

    def rows(
        self, heights: Int64Array, widths: Int64Array, frames: Int64Array | int = 1
    ) -> Int64Array:
        """Return the rows of a sound of each length, ``[sizes]``."""
        return self.windows.patches_of(heights, widths) // self.windows.pooled

    def preparing(self) -> tuple[object, ...]:
        """Return what stands for a sound, and which files are bad."""
        return self.placeholder, self.most_seconds

    def identity(self) -> tuple[object, ...]:
        """Return how sounds are heard."""
        return *_HEARING, self.windows


def settings_of(spec: MediaSpec) -> MediaSettings:
    """Return what a declaration means.

    Raises:
        ValueError: keys that the encoder has no use for, or limits that exclude each other.
    """
    encoder: Encoder = ENCODERS[spec.encoder]
    is_sound = isinstance(encoder.resizing, Windows)
    kind = spec.kind or ("sounds" if is_sound else "pictures")
    if (kind == "sounds") != is_sound:
        raise ValueError(
            f"found kind: {kind} for {spec.encoder}, expected {'' if is_sound else 'no '}sounds: "
            "leave it out, or name another encoder"
        )
    of_others = {name for keys in _KEYS.values() for name in keys}.difference(_KEYS[kind])
    for one in fields(MediaSpec):
        if one.name in of_others and getattr(spec, one.name) != one.default:
            raise ValueError(
                f"found {one.name.replace('_', '-')} for {spec.encoder}, expected none: its items "
                f"are {kind}"
            )
    if isinstance(encoder.resizing, Windows):
        return SoundSettings.of(spec, encoder.resizing)
    return VideoSettings.of(spec) if kind == "videos" else PictureSettings.of(spec)


def _limited(limits: Limits, spec: MediaSpec) -> Limits:
    found = replace(
        limits, least=spec.least_pixels or limits.least, most=spec.most_pixels or limits.most
    )
    if found.least > found.most:
        raise ValueError(
            f"found least-pixels {found.least:,} above most-pixels {found.most:,}, expected them "
            "in order"
        )
    return found
