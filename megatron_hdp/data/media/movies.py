"""Frames of MP4, MOV, Matroska, WebM and AVI: counted by their headers, decoded by PyAV."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.extras import import_extra
from megatron_hdp.data.media.sizes import MediaError

EXTRA = "video"

_HEAD_BYTES = 12
_EBML = b"\x1a\x45\xdf\xa3"
_FIRST_BOXES = b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide"
_DEMUXERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"
"""What may read a file: others open further ones that it names."""
_BOX, _LARGE_BOX = struct.Struct(">I4s"), struct.Struct(">Q")
_MATRICES = {0: 40, 1: 52}  # where a track's matrix stands, by the version of its box
_MATRIX = struct.Struct(">9iI")  # and the track's width
_MOST_TRACK_BYTES = 2**10
_UPRIGHT = (1, 0, 0, 1)
_MOST_BOXES = 10_000
# What PyAV raises on bytes that are not as they should be, beside FFmpeg's errors.
_DAMAGES = ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError


def is_movie(stream: BinaryIO) -> bool:
    """Whether a file begins as one that is read here."""
    stream.seek(0)
    head = stream.read(_HEAD_BYTES)
    return (
        head[4:8] in _FIRST_BOXES
        or head[:4] == _EBML
        or (head[:4] == b"RIFF" and head[8:] == b"AVI ")
    )


def movie_size(stream: BinaryIO, name: str) -> tuple[int, int, int, float]:
    """Return height, width, number and rate of the frames of a file's first video.

    No frame is asked for, though FFmpeg may look into the first ones to know their form. Where the
    header does not tell the number of frames, as Matroska's, their packets are counted.

    Args:
        stream: the file, which can seek; it stands anywhere.
        name: what an error calls it.

    Raises:
        MediaError: it has no video, is damaged, or is turned when it is shown.
        ModuleNotFoundError: PyAV is not installed.
    """
    _require_upright(stream, name)
    with _opened(stream, name) as (container, video):
        count = video.frames or sum(bool(packet.size) for packet in container.demux(video))
        if not video.average_rate or not video.height or not video.width:
            raise MediaError(
                f"{name}: found no rate or size of frames, expected them: save it again"
            )
        return int(video.height), int(video.width), int(count), float(video.average_rate)


def movie_frames(
    stream: BinaryIO, name: str, chosen: Int64Array, most_pixels: int
) -> Iterator[Any]:
    """Yield some frames of a video, as Pillow's pictures in colours.

    Args:
        stream: as of `movie_size`.
        name: likewise.
        chosen: numbers of frames, rising.
        most_pixels: of a frame.

    Raises:
        MediaError: it is damaged, or has fewer frames than its header says.
        ModuleNotFoundError: PyAV or Pillow is not installed.
    """
    pillow = import_extra("PIL.Image", name, extra="media")
    wanted, number = iter(chosen.tolist()), -1
    next_one = next(wanted)
    with _opened(stream, name) as (container, video):
        video.codec_context.options = {"max_pixels": str(most_pixels), "err_detect": "explode"}
        for number, frame in enumerate(container.decode(video)):
            if frame.is_corrupt or frame.rotation:
                how = "damaged" if frame.is_corrupt else "turned"
                raise MediaError(
                    f"{name}: found frame {number:,} {how}, expected it whole and upright: save "
                    "the video again, or leave it out"
                )
            while number == next_one:
                yield pillow.fromarray(frame.to_ndarray(format="rgb24"))
                next_one = next(wanted, -1)
            if next_one < 0:
                return
    raise MediaError(
        f"{name}: found {number + 1:,} frames, expected {int(chosen[-1]) + 1:,} or more by the "
        "header: save it again, or leave it out"
    )


@contextmanager
def _opened(stream: BinaryIO, name: str) -> Iterator[tuple[Any, Any]]:
    """Open a file and its first video; what PyAV says of its bytes within is a `MediaError`."""
    library = import_extra("av", name, EXTRA)
    stream.seek(0)
    try:
        with library.open(stream, container_options={"format_whitelist": _DEMUXERS}) as container:
            video = next(iter(container.streams.video), None)
            if video is None or video.codec_context is None:
                raise MediaError(
                    f"{name}: found no video that can be decoded, expected one: save it again"
                )
            yield container, video
    except MediaError:
        raise
    except (library.FFmpegError, *_DAMAGES) as error:
        raise MediaError(
            f"{name}: found a damaged video ({error}), expected a whole one: leave it out, or copy "
            "it again"
        ) from error


def _require_upright(stream: BinaryIO, name: str) -> None:
    """Refuses an MP4 or MOV that says that it is to be turned, as telephones do."""
    for matrix in _matrices(stream):
        signs = tuple((one > 0) - (one < 0) for one in matrix)
        if signs != _UPRIGHT and any(signs):
            raise MediaError(
                f"{name}: found a video that is turned when it is shown, expected it upright: save "
                "it again (`ffmpeg -i IN OUT` turns it), or leave it out"
            )


def _matrices(stream: BinaryIO) -> Iterator[tuple[int, ...]]:
    """How each track with pictures of an MP4 or MOV is turned: a, b, c, d; of other files none."""
    for film, begin, stop in _boxes(stream, 0, stream.seek(0, os.SEEK_END)):
        for track, first, last in _boxes(stream, begin, stop) if film == b"moov" else ():
            for kind, at, end in _boxes(stream, first, last) if track == b"trak" else ():
                stream.seek(at)
                content = stream.read(min(end - at, _MOST_TRACK_BYTES)) if kind == b"tkhd" else b""
                place = _MATRICES.get(content[0]) if content else None
                if place is not None and len(content) >= place + _MATRIX.size:
                    a, b, _, c, d, *_, width = _MATRIX.unpack_from(content, place)
                    if width:
                        yield a, b, c, d


def _boxes(stream: BinaryIO, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Kind, first byte and end of the content of each box that begins within these bytes."""
    for _ in range(_MOST_BOXES):
        stream.seek(at)
        head = stream.read(_BOX.size + _LARGE_BOX.size)
        if at + _BOX.size > end or len(head) < _BOX.size:
            return
        size, kind = _BOX.unpack_from(head)
        begin = at + _BOX.size
        if size == 1 and len(head) == _BOX.size + _LARGE_BOX.size:
            (size,) = _LARGE_BOX.unpack_from(head, _BOX.size)
            begin += _LARGE_BOX.size
        stop = min(at + size, end) if size else end
        if stop < begin:
            return
        yield kind, begin, stop
        at = stop
