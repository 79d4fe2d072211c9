"""From a video to temporal patches: its frames counted, some of them chosen, decoded and resized.

Which frames are chosen is as the processors of `transformers` for Qwen's models do it; each becomes
what a picture would.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from megatron_hdp.arrays import AnyArray, Float32Array, Int64Array
from megatron_hdp.data.media.headers import animation_of
from megatron_hdp.data.media.movies import is_movie, movie_frames, movie_size
from megatron_hdp.data.media.pictures import colours_of, cut
from megatron_hdp.data.media.sizes import MediaError, opened, size_of_picture
from megatron_hdp.media import Resizing

MOST_FRAMES = 2**31 - 1


@dataclass(frozen=True)
class VideoSize:
    """How large and long a video is."""

    height: int
    """In pixels."""
    width: int
    num_frames: int
    """Of the file, or of a list of frames."""
    rate: float
    """Frames a second."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which frames of a video are seen."""

    rate: float
    """Frames a second that are wanted."""
    least: int
    """Of a video that has them."""
    most: int
    is_even: bool
    """Whether they are as many as temporal patches of two need, each at the begin of its share of
    the video, as Qwen2.5-VL's processor does it. Else they reach from the first frame to the last
    one, as Qwen3-VL's does."""

    def chosen(self, size: VideoSize, name: str) -> Int64Array:
        """Return the numbers of frames that are seen, ``[frames]``.

        Raises:
            MediaError: they are fewer than two.
        """
        total = size.num_frames
        if self.is_even:
            most = min(self.most, total) // 2 * 2
            count = int(min(max(total / size.rate * self.rate, self.least), most)) // 2 * 2
        else:
            count = min(max(int(total / size.rate * self.rate), self.least), self.most, total)
        if count < 2:
            raise MediaError(
                f"{name}: found a video of {total:,} frames of which {count} would be seen, "
                "expected two or more: give it as a picture, or leave it out"
            )
        if self.is_even:
            begins: Float32Array = (np.arange(count) * (total / count)).astype(np.float32)
            return begins.astype(np.int64)
        return np.linspace(0, total - 1, count).round().astype(np.int64)


def size_of_video(stream: BinaryIO, name: str, *, most_pixels: int) -> VideoSize:
    """Return the size of the video in a file; no frame is asked for.

    Args:
        stream: the file, which can seek; it stands anywhere.
        name: what an error calls it.
        most_pixels: of a frame.

    Raises:
        MediaError: it is no video that is read here, its header is damaged, it is too large.
        ModuleNotFoundError: it is neither GIF nor WebP, and PyAV is not installed.
    """
    if is_movie(stream):
        found = VideoSize(*movie_size(stream, name))
    elif (animation := animation_of(stream)) is not None:
        height, width, durations = animation
        rate = len(durations) / sum(durations) if durations else 1.0
        found = VideoSize(height, width, len(durations), rate)
    else:
        raise MediaError(
            f"{name}: found no video that is read here, expected MP4, MOV, MKV, WebM, AVI, a GIF "
            "or WebP of several frames, or a list of frames: save it as one, or leave it out"
        )
    if not 1 <= found.num_frames <= MOST_FRAMES or found.height * found.width > most_pixels:
        raise MediaError(
            f"{name}: found {found.num_frames:,} frames of {found.height:,} x {found.width:,} "
            f"pixels, expected 1 to {MOST_FRAMES:,} of at most {most_pixels:,}: cut it, make it "
            "smaller, leave it out, or raise most-file-pixels"
        )
    return found


def size_of_frames(
    streams: Iterable[BinaryIO], name: str, rate: float, *, most_pixels: int
) -> VideoSize:
    """Return the size of a video that is a list of pictures; arguments as of `size_of_video`.

    Raises:
        MediaError: one is no picture that is read here, or of another size than the first one.
    """
    first, count = None, 0
    for count, stream in enumerate(streams, start=1):
        size = size_of_picture(stream, f"{name}, frame {count}", most_pixels=most_pixels)
        first = first or size
        if size != first:
            raise MediaError(
                f"{name}: found frame {count} of {size.height:,} x {size.width:,} pixels, expected "
                f"{first.height:,} x {first.width:,} as of the first one: make them equal"
            )
    if first is None or count > MOST_FRAMES:
        raise MediaError(f"{name}: found {count:,} frames, expected 1 to {MOST_FRAMES:,}")
    return VideoSize(first.height, first.width, count, rate)


def frames_of_video(
    stream: BinaryIO, name: str, chosen: Int64Array, *, most_pixels: int
) -> Iterator[Any]:
    """Yield some frames of a video, as Pillow's pictures in colours.

    Args:
        stream: its file, which can seek; it stands anywhere.
        name: what an error calls it.
        chosen: numbers of frames, rising.
        most_pixels: of a frame.

    Raises:
        MediaError: it is damaged.
        ModuleNotFoundError: Pillow or PyAV is not installed, and needed for it.
    """
    if is_movie(stream):
        yield from movie_frames(stream, name, chosen, most_pixels)
        return
    with opened(stream, name, most_pixels) as image:
        for number in chosen.tolist():
            image.seek(number)
            yield colours_of(image, name)


def patches_of_frames(frames: Sequence[AnyArray], resizing: Resizing) -> AnyArray:
    """Return a temporal patch, as `media.Patches.values`; of a single frame a picture's."""
    parts = [cut(one, resizing.patch, resizing.merge).values for one in frames]
    if len(parts) == 1:
        return parts[0]
    by_colour = [one.reshape(len(one), 3, 1, -1) for one in parts]
    return np.concatenate(by_colour, axis=2).reshape(len(parts[0]), -1)


class KeptVideos:
    """Resized frames of the videos that were decoded last; each is decoded by one thread."""

    def __init__(self, most_bytes: int) -> None:
        """Set how much of them is kept; the last one whole."""
        self._most, self._guard = most_bytes, threading.Lock()
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()

    def of(self, key: Hashable, decode: Callable[[], list[AnyArray]]) -> list[AnyArray]:
        """Return the frames of a video, decoded now unless they are kept.

        Raises:
            MediaError: it is damaged; again, once it was.
        """
        with self._guard:
            kept = self._kept.setdefault(key, _Kept())
            self._kept.move_to_end(key)
        with kept.decoding:
            if kept.found is None:
                try:
                    kept.found = decode()
                except MediaError as error:
                    kept.found = str(error)
        with self._guard:
            while len(self._kept) > 1 and self._num_bytes() > self._most:
                self._kept.popitem(last=False)
        if isinstance(kept.found, str):
            raise MediaError(kept.found)
        return kept.found

    def _num_bytes(self) -> int:
        lists = (one.found for one in self._kept.values() if isinstance(one.found, list))
        return sum(frame.nbytes for frames in lists for frame in frames)


@dataclass(eq=False)
class _Kept:
    decoding: threading.Lock = field(default_factory=threading.Lock)
    found: list[AnyArray] | str | None = None
    """Its frames, or why it is damaged."""
