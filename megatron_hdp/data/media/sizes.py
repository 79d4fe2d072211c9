"""The size of a picture from its header: nothing is decoded, the name's ending is not looked at."""

import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from megatron_hdp.data.extras import import_extra
from megatron_hdp.data.media.headers import tiff_size, webp_size

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "AVIF", "BMP")
"""What is read; by content, so that no other decoder runs because a file asks for it."""
MOST_PIXELS = 2**26
"""Height x width of a picture that is decoded: 200 MB of colours."""

_ORIENTATION, _LYING = 0x112, range(5, 9)
_UPRIGHT = "TIFF"  # Pillow gives its size as it is turned
_DESCRIBING = {b"eXIf", b"tEXt", b"zTXt", b"iTXt"}
_CHUNK_HEAD = struct.Struct(">I4s")
_PNG_HEAD_BYTES, _CHECKSUM_BYTES = 8, 4
# What Pillow's readers raise on bytes that are not as they should be.
_DAMAGES: tuple[type[Exception], ...] = (
    *(OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, AttributeError),
    *(ArithmeticError, RuntimeError, struct.error, zlib.error),
)


class MediaError(ValueError):
    """A picture that cannot be read, or is too large."""


@dataclass(frozen=True)
class PictureSize:
    """How large a picture is, once it is turned as its EXIF orientation says."""

    height: int
    """In pixels."""
    width: int


def size_of_picture(stream: BinaryIO, name: str, *, most_pixels: int = MOST_PIXELS) -> PictureSize:
    """Return the size of the picture in a file, of several the first one's.

    Args:
        stream: the file, which can seek; it stands anywhere.
        name: what an error calls it.
        most_pixels: of height x width.

    Raises:
        MediaError: it is no picture that is read here, its header is damaged, it is too large.
        ModuleNotFoundError: Pillow is not installed.
    """
    plain = webp_size(stream) or tiff_size(stream)
    if plain is not None and plain[0] * plain[1] <= most_pixels:
        return PictureSize(*plain)
    with opened(stream, name, most_pixels) as image:
        width, height = image.size
        if image.format != _UPRIGHT and _orientation(image, stream) in _LYING:
            height, width = width, height
        return PictureSize(height, width)


@contextmanager
def opened(stream: BinaryIO, name: str, most_pixels: int) -> Iterator[Any]:
    """Open a picture; what Pillow says of its bytes within the block is a `MediaError`.

    Raises:
        MediaError: as of `size_of_picture`, or what the block came upon.
        OSError: the disk failed.
    """
    pillow = import_extra("PIL.Image", name, extra="media")
    try:
        with pillow.open(stream, formats=FORMATS) as image:
            width, height = image.size
            if width * height > most_pixels:
                raise MediaError(_too_large(name, f"{height:,} x {width:,}", most_pixels))
            yield image
    except (MediaError, MemoryError):
        raise
    except pillow.DecompressionBombError as error:  # twice a limit of Pillow's own
        raise MediaError(_too_large(name, "more than 178,956,970", most_pixels)) from error
    except pillow.UnidentifiedImageError as error:
        raise MediaError(
            f"{name}: found no picture with a whole header, expected one of "
            f"{', '.join(FORMATS)}: leave it out, or save it again"
        ) from error
    except _DAMAGES as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise MediaError(
            f"{name}: found a damaged picture ({error}), expected a whole one: leave it out, or "
            "copy it again"
        ) from error


def _too_large(name: str, pixels: str, most_pixels: int) -> str:
    return (
        f"{name}: found a picture of {pixels} pixels, expected at most {most_pixels:,}: make it "
        "smaller or leave it out, or raise most-pixels"
    )


def _orientation(image: Any, stream: BinaryIO) -> int:
    """How a picture lies, 1 to 8; 1 where it says nothing."""
    if image.format == "PNG" and "exif" not in image.info and not _is_described_behind(stream):
        # Pillow would decode the picture to look behind its pixels.
        image.info["exif"] = b""
    found: int = image.getexif().get(_ORIENTATION, 1)
    return found


def _is_described_behind(stream: BinaryIO) -> bool:
    """Whether a PNG has chunks behind its pixels that may say how it lies; looks at no other."""
    stream.seek(_PNG_HEAD_BYTES)
    is_behind = False
    while len(head := stream.read(_CHUNK_HEAD.size)) == _CHUNK_HEAD.size:
        length, kind = _CHUNK_HEAD.unpack(head)
        if is_behind and kind in _DESCRIBING:
            return True
        if kind == b"IEND" or (is_behind and kind == b"fcTL"):
            return False
        is_behind |= kind == b"IDAT"
        stream.seek(length + _CHECKSUM_BYTES, os.SEEK_CUR)
    return False
