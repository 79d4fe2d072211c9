"""What a source says of its pictures or sounds: how they are read, and what stands for one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import BinaryIO, ClassVar

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.media.sizes import MediaError, size_of_picture
from megatron_hdp.data.media.sounds import RATE, size_of_sound
from megatron_hdp.data.media.spectrograms import BINS, HOP
from megatron_hdp.data.spec import MediaSpec
from megatron_hdp.media import ENCODERS, Encoder, Resizing, Windows

DECODER = "pillow"
"""What decodes and resizes; another one would give other bits."""
_HEARING = "float32", RATE, HOP, BINS
"""What sounds become; whoever reads a file gives the same samples."""
_QWEN = "<|image_pad|>", "<|vision_start|>{}<|vision_end|>", ""
_LLAVA = "<image>", "{}", "\n"
_AUDIO, _AROUND_AUDIO = "<|AUDIO|>", "<|audio_bos|>{}<|audio_eos|>"
_OF_PICTURES = "least_pixels", "most_pixels", "most_file_pixels"
_OF_SOUNDS = ("most_seconds",)


@dataclass(frozen=True, kw_only=True)
class MediaSettings(ABC):
    """Of one source, whose items are of one kind."""

    noun: ClassVar[str]
    """What an item is called."""
    unit: ClassVar[str]
    """What an item's height x width counts."""
    lists: ClassVar[tuple[str, str]]
    """Keys of a row under which items are named: one, and several. Those are also the kinds of
    parts that are items, the first one with ``_url`` too; between < and > it marks one in a text.
    """
    placeholder: str
    """The token that stands for an item."""
    written: str
    """What an item is in a text."""

    @property
    def mark(self) -> str:
        """What stands for an item in the texts of a row."""
        return f"<{self.lists[0]}>"

    @abstractmethod
    def part(self, number: int) -> str:
        """Return what an item is where it is a part of a message: what follows stands behind it.

        Args:
            number: among the items of its conversation, from 1 on.
        """

    @abstractmethod
    def size_of(self, stream: BinaryIO, name: str) -> tuple[int, int]:
        """Return an item's height and width by its header: pixels, or 1 and frames of 10 ms.

        Raises:
            MediaError: it is none that is encoded, or its header is damaged.
            ModuleNotFoundError: a library for it is not installed.
        """

    @abstractmethod
    def rows(self, heights: Int64Array, widths: Int64Array) -> Int64Array:
        """Return the rows of an item of each size, ``[sizes]``.

        Raises:
            ValueError: one has none, or is of no size that is encoded.
        """

    @abstractmethod
    def preparing(self) -> tuple[object, ...]:
        """Return all but `written` that decides what becomes of an item when it is prepared."""

    @abstractmethod
    def identity(self) -> tuple[object, ...]:
        """Return all that rows and values of items depend on, beside their files."""


@dataclass(frozen=True, kw_only=True)
class PictureSettings(MediaSettings):
    """Of a source with pictures."""

    noun, unit = "picture", "pixels"
    lists = "image", "images"
    resizing: Resizing
    written_part: str
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
        images = resizing.images
        images = replace(images, least=least or images.least, most=most or images.most)
        if images.least > images.most:
            raise ValueError(
                f"found least-pixels {images.least:,} above most-pixels {images.most:,}, "
                "expected them in order"
            )
        placeholder = spec.placeholder or usual
        written = around.format(placeholder)
        return cls(
            resizing=replace(resizing, images=images),
            placeholder=placeholder,
            written=written,
            written_part=written + behind,
            most_file_pixels=spec.most_file_pixels,
        )

    def part(self, number: int) -> str:
        """Return the same for all."""
        return self.written_part

    def size_of(self, stream: BinaryIO, name: str) -> tuple[int, int]:
        """Return height and width in pixels, upright."""
        found = size_of_picture(stream, name, most_pixels=self.most_file_pixels)
        return found.height, found.width

    def rows(self, heights: Int64Array, widths: Int64Array) -> Int64Array:
        """Return the rows of a picture of each size, ``[sizes]``."""
        return self.resizing.patches_of(heights, widths) // self.resizing.merge**2

    def preparing(self) -> tuple[object, ...]:
        """Return what parts are, and which files are bad."""
        return self.written_part, self.most_file_pixels

    def identity(self) -> tuple[object, ...]:
        """Return who decodes, and how pictures are resized."""
        return DECODER, self.resizing


@dataclass(frozen=True, kw_only=True)
class SoundSettings(MediaSettings):
    """Of a source with sounds."""

    noun, unit = "sound", "frames"
    lists = "audio", "audios"
    windows: Windows
    most_seconds: int

    @classmethod
    def of(cls, spec: MediaSpec, windows: Windows) -> SoundSettings:
        """Return what a declaration means; see `settings_of`."""
        placeholder = spec.placeholder or _AUDIO
        return cls(
            placeholder=placeholder,
            written=_AROUND_AUDIO.format(placeholder),
            windows=windows,
            most_seconds=spec.most_seconds,
        )

    def part(self, number: int) -> str:
        """Return it with its number, as Qwen2-Audio's template does."""
        return f"Audio {number}: {self.written}\n"

    def size_of(self, stream: BinaryIO, name: str) -> tuple[int, int]:
        """Return 1, and frames of 10 ms: no more than are heard."""
        found = size_of_sound(stream, name)
        if found.num_samples > self.most_seconds * found.rate:
            raise MediaError(
                f"{name}: found a sound of {found.num_samples / found.rate:,.1f} s, expected at "
                f"most {self.most_seconds}: cut it, or leave it out; with a larger most-seconds "
                f"its first {self.windows.most_frames * HOP // RATE} s are heard"
            )
        return 1, min(-(-found.num_heard // HOP), self.windows.most_frames)

    def rows(self, heights: Int64Array, widths: Int64Array) -> Int64Array:
        """Return the rows of a sound of each length, ``[sizes]``."""
        return self.windows.patches_of(heights, widths) // self.windows.pooled

    def preparing(self) -> tuple[object, ...]:
        """Return which files are bad."""
        return (self.most_seconds,)

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
    usual = {one.name: one.default for one in fields(MediaSpec)}
    for name in _OF_PICTURES if is_sound else _OF_SOUNDS:
        if getattr(spec, name) != usual[name]:
            raise ValueError(
                f"found {name.replace('_', '-')} for {spec.encoder}, expected none: its items are "
                f"{'sounds' if is_sound else 'pictures'}"
            )
    if isinstance(encoder.resizing, Windows):
        return SoundSettings.of(spec, encoder.resizing)
    return PictureSettings.of(spec)
