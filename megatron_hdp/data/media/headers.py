"""Sizes of WebP and TIFF from a few bytes, where nothing about them is unusual; Pillow reads more.

What is left to Pillow is None here: it alone says whether something is a picture, and why not. Of
GIF and WebP all frames are counted, as a video's.
"""

import os
import struct
from typing import BinaryIO

_ORIENTATION, _LYING = 0x112, range(5, 9)

_WEBP_HEAD_BYTES, _CHUNK_HEAD = 30, struct.Struct("<4sI")
_EXIF, _XMP = 0b1000, 0b0100
_EXIF_PREFIX = b"Exif\0\0"
_MOST_METADATA_BYTES = 2**20

_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_SHORT, _LONG = 3, 4
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _COLOURS = 0x100, 0x101, 0x102, 0x103, 0x106
_FILL_ORDER, _STRIPS, _SAMPLES, _TILES = 0x10A, 0x111, 0x115, 0x144
_EXTRA_SAMPLES, _SAMPLE_FORMAT = 0x152, 0x153
_LOSSLESS = (1, 5, 8, 32_773)  # none, LZW, Deflate, PackBits
_SAMPLES_OF = {1: 1, 2: 3}  # grey, red green blue

_GIFS = b"GIF87a", b"GIF89a"
_GIF_HEAD_BYTES, _GIF_IMAGE = 13, struct.Struct("<HHHHB")
_EXTENSION, _IMAGE, _CONTROL = 0x21, 0x2C, 0xF9
_HAS_COLOURS, _COLOUR_BITS = 0x80, 0x07
_ANIMATED = 0b0010
_FRAME_HEAD_BYTES = 15
_SHORTEST_S, _UNTOLD_S = 0.02, 0.1  # of a frame: what is shorter is shown for longer

Entries = dict[int, tuple[int, int, bytes]]
"""Type, count and the last four bytes of each entry of a directory, by tag."""


def webp_size(stream: BinaryIO) -> tuple[int, int] | None:
    """Return height and width of a WebP, turned; its pixels are not read."""
    stream.seek(0)
    head = stream.read(_WEBP_HEAD_BYTES)
    if len(head) < _WEBP_HEAD_BYTES or head[:4] != b"RIFF" or head[8:12] != b"WEBP":
        return None
    is_lying: bool | None = False
    if head[12:16] == b"VP8 " and head[23:26] == b"\x9d\x01\x2a":
        width, height = (side & 0x3FFF for side in struct.unpack("<HH", head[26:30]))
    elif head[12:16] == b"VP8L" and head[20] == 0x2F:
        bits = int.from_bytes(head[21:25], "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif head[12:16] == b"VP8X":
        width, height = (int.from_bytes(head[at : at + 3], "little") + 1 for at in (24, 27))
        if head[20] & (_EXIF | _XMP):
            end = int.from_bytes(head[4:8], "little") + 8
            is_lying = _webp_is_lying(stream, end, head[20])
    else:
        return None
    if is_lying is None or not (height and width):
        return None
    return (width, height) if is_lying else (height, width)


def tiff_size(stream: BinaryIO) -> tuple[int, int] | None:
    """Return height and width of a TIFF's first picture, turned, of usual grey or colours."""
    stream.seek(0)
    head = stream.read(8)
    order = _ORDERS.get(head[:4])
    if order is None or len(head) < 8:
        return None
    (first,) = struct.unpack(f"{order}I", head[4:])
    entries = _directory(stream, first, order)
    if entries is None or not _is_usual(stream, entries, order):
        return None
    height, width = (_number(entries, tag, order) for tag in (_HEIGHT, _WIDTH))
    orientation = _number(entries, _ORIENTATION, order, usual=1)
    if not height or not width or orientation is None:
        return None
    return (width, height) if orientation in _LYING else (height, width)


def animation_of(stream: BinaryIO) -> tuple[int, int, list[float]] | None:
    """Return height, width and the seconds of each frame of a GIF or WebP; None: it is neither.

    A frame of less than 20 ms takes 100 ms, as browsers and FFmpeg show it. A GIF that ends too
    early has the frames that have begun.
    """
    stream.seek(0)
    head = stream.read(_WEBP_HEAD_BYTES)
    if head[:6] in _GIFS and len(head) >= _GIF_HEAD_BYTES:
        return _gif(stream, head)
    if head[:4] == b"RIFF" and head[8:16] == b"WEBPVP8X" and len(head) == _WEBP_HEAD_BYTES:
        return _moving_webp(stream, head)
    return None


def _gif(stream: BinaryIO, head: bytes) -> tuple[int, int, list[float]] | None:
    width, height, flags = struct.unpack_from("<HHB", head, 6)
    stream.seek(_GIF_HEAD_BYTES + _colours_bytes(flags))
    durations: list[float] = []
    duration = 0.0
    while len(kind := stream.read(1)) and kind[0] in (_EXTENSION, _IMAGE):
        if kind[0] == _IMAGE:
            image = stream.read(_GIF_IMAGE.size)
            if len(image) < _GIF_IMAGE.size:
                break
            left, top, wide, high, flags = _GIF_IMAGE.unpack(image)
            if left + wide > width or top + high > height:
                return None
            durations.append(_shown(duration))
            duration = 0.0
            stream.seek(_colours_bytes(flags) + 1, os.SEEK_CUR)
        elif stream.read(1) == bytes([_CONTROL]):
            control = stream.read(5)
            duration = int.from_bytes(control[2:4], "little") / 100
        while len(size := stream.read(1)) and size[0]:
            stream.seek(size[0], os.SEEK_CUR)
    return (height, width, durations) if height and width else None


def _colours_bytes(flags: int) -> int:
    """Of a table of colours."""
    return 3 << (flags & _COLOUR_BITS) + 1 if flags & _HAS_COLOURS else 0


def _moving_webp(stream: BinaryIO, head: bytes) -> tuple[int, int, list[float]] | None:
    if not head[20] & _ANIMATED:
        return None
    width, height = (int.from_bytes(head[at : at + 3], "little") + 1 for at in (24, 27))
    at, end = _WEBP_HEAD_BYTES, int.from_bytes(head[4:8], "little") + 8
    durations = []
    while at + _CHUNK_HEAD.size <= end:
        stream.seek(at)
        chunk = stream.read(_CHUNK_HEAD.size + _FRAME_HEAD_BYTES)
        if len(chunk) < _CHUNK_HEAD.size:
            break
        kind, size = _CHUNK_HEAD.unpack_from(chunk)
        if kind == b"ANMF" and len(chunk) == _CHUNK_HEAD.size + _FRAME_HEAD_BYTES:
            durations.append(_shown(int.from_bytes(chunk[-3:], "little") / 1000))
        at += _CHUNK_HEAD.size + size + size % 2
    return height, width, durations


def _shown(seconds: float) -> float:
    return _UNTOLD_S if seconds < _SHORTEST_S else seconds


def _webp_is_lying(stream: BinaryIO, end: int, flags: int) -> bool | None:
    """Whether its EXIF turns a WebP to its side; None: Pillow has to say."""
    at, orientation, unknown = _WEBP_HEAD_BYTES, None, flags & (_EXIF | _XMP)
    while unknown and at + _CHUNK_HEAD.size <= end:
        stream.seek(at)
        head = stream.read(_CHUNK_HEAD.size)
        if len(head) < _CHUNK_HEAD.size:
            return None
        kind, size = _CHUNK_HEAD.unpack(head)
        at += _CHUNK_HEAD.size + size + size % 2
        if kind not in (b"EXIF", b"XMP "):
            continue
        content = stream.read(min(size, _MOST_METADATA_BYTES))
        if len(content) < size:
            return None
        if kind == b"EXIF":
            unknown &= ~_EXIF
            if (orientation := _orientation_of(content)) is None:
                return None
        else:
            unknown &= ~_XMP
            if b"Orientation" in content:
                return None
    return None if unknown else orientation in _LYING


def _orientation_of(exif: bytes) -> int | None:
    """How EXIF says that a picture lies, 1 where it says nothing; None: it is unusual."""
    exif = exif.removeprefix(_EXIF_PREFIX)
    order = _ORDERS.get(exif[:4])
    if order is None or len(exif) < 8:
        return None
    (first,) = struct.unpack(f"{order}I", exif[4:8])
    entries = _entries(exif[first : first + 2], exif[first + 2 :], order)
    return None if entries is None else _number(entries, _ORIENTATION, order, usual=1)


def _directory(stream: BinaryIO, place: int, order: str) -> Entries | None:
    stream.seek(place)
    head = stream.read(2)
    count = int.from_bytes(head, "little" if order == "<" else "big")
    return _entries(head, stream.read(12 * count), order)


def _entries(head: bytes, body: bytes, order: str) -> Entries | None:
    if len(head) < 2:
        return None
    (count,) = struct.unpack(f"{order}H", head)
    if len(body) < 12 * count:
        return None
    found = struct.iter_unpack(f"{order}HHI4s", body[: 12 * count])
    return {tag: (kind, number, value) for tag, kind, number, value in found}


def _number(entries: Entries, tag: int, order: str, usual: int | None = None) -> int | None:
    """A tag's number, `usual` where there is none; None: it is another kind of value."""
    if tag not in entries:
        return usual
    kind, count, value = entries[tag]
    if count != 1 or kind not in (_SHORT, _LONG):
        return None
    found: int = struct.unpack(f"{order}{'H' if kind == _SHORT else 'I'}", value[: 2 * kind - 4])[0]
    return found


def _is_usual(stream: BinaryIO, entries: Entries, order: str) -> bool:
    """Whether Pillow is sure to open it: eight bits a colour, packed in a common way."""
    colours = _number(entries, _COLOURS, order)
    samples = _number(entries, _SAMPLES, order, usual=1)
    return (
        samples is not None
        and _SAMPLES_OF.get(colours or 0) == samples
        and _number(entries, _COMPRESSION, order, usual=1) in _LOSSLESS
        and _number(entries, _FILL_ORDER, order, usual=1) == 1
        and not entries.keys() & {_EXTRA_SAMPLES, _SAMPLE_FORMAT}
        and bool(entries.keys() & {_STRIPS, _TILES})
        and _bits(stream, entries, order) == (8,) * samples
    )


def _bits(stream: BinaryIO, entries: Entries, order: str) -> tuple[int, ...]:
    kind, count, value = entries.get(_BITS, (0, 0, b""))
    if kind != _SHORT or count not in _SAMPLES_OF.values():
        return ()
    if count > 2:
        stream.seek(struct.unpack(f"{order}I", value)[0], os.SEEK_SET)
        value = stream.read(2 * count)
    value = value[: 2 * count]
    return struct.unpack(f"{order}{count}H", value) if len(value) == 2 * count else ()
