"""Sizes from a few bytes are those that Pillow finds; it is asked where that is not sure."""

import io
import random
import struct
from collections.abc import Iterator

import pytest
from PIL import Image, ImageOps

from megatron_hdp.data.media.headers import tiff_size, webp_size
from tests.data.media.drawn import ORIENTATION, drawn

SIZES = {"TIFF": tiff_size, "WEBP": webp_size}
COMPRESSIONS = (
    "raw",
    "tiff_lzw",
    "tiff_deflate",
    "packbits",
    "group4",
    "jpeg",
    "tiff_adobe_deflate",
)
XMP = b'<rdf:Description tiff:Orientation="6"/>'


def of_pillow(raw: bytes) -> tuple[int, int] | None:
    try:
        with Image.open(io.BytesIO(raw)) as image:
            lies = image.format != "TIFF" and image.getexif().get(ORIENTATION, 1) in range(5, 9)
            width, height = image.size
            return (width, height) if lies else (height, width)
    except Image.DecompressionBombError:
        return None
    except (OSError, SyntaxError, ValueError, LookupError, TypeError, struct.error):
        return None


def written() -> Iterator[tuple[str, bytes, bool]]:
    """Files in all ways that Pillow writes them, and whether the few bytes say enough."""
    picture = drawn(30, 41)
    for orientation in (1, 6):
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        for mode in ("1", "L", "P", "RGB", "RGBA", "LA", "CMYK", "I;16", "F", "YCbCr"):
            for compression in COMPRESSIONS:
                stream = io.BytesIO()
                try:
                    shown = picture.convert("L" if mode == "I;16" else "RGB").convert(mode)
                    shown.save(stream, "TIFF", compression=compression, exif=exif)
                except (OSError, ValueError):
                    continue  # it cannot be written so
                usual = mode in ("L", "RGB") and compression not in ("group4", "jpeg")
                yield "TIFF", stream.getvalue(), usual
        for more in ({}, {"xmp": b"<x/>"}, {"xmp": XMP}, {"icc_profile": b"p"}, {"lossless": True}):
            for mode in ("RGB", "RGBA"):
                stream = io.BytesIO()
                picture.convert(mode).save(stream, "WEBP", exif=exif.tobytes(), **more)
                yield "WEBP", stream.getvalue(), more.get("xmp") != XMP
    for more in (
        {"xmp": b"<x/>"},
        {"xmp": XMP},
        {"save_all": True, "append_images": [drawn(30, 41, 1)]},
    ):
        stream = io.BytesIO()
        picture.save(stream, "WEBP", **more)
        yield "WEBP", stream.getvalue(), more.get("xmp") != XMP


WRITTEN = list(written())


def test_sizes_are_those_of_pillow() -> None:
    assert len(WRITTEN) > 80
    for form, raw, usual in WRITTEN:
        found = SIZES[form](io.BytesIO(raw))
        if usual:
            upright = ImageOps.exif_transpose(Image.open(io.BytesIO(raw)))
            assert found == (upright.height, upright.width)
        else:
            assert found is None


def swapped(raw: bytes) -> bytes:
    """A TIFF of Pillow's, in the other order of bytes: header and directory, not pixels."""
    (first,) = struct.unpack("<I", raw[4:8])
    (count,) = struct.unpack("<H", raw[first : first + 2])
    found = bytearray(raw)
    found[:8] = b"MM\0*" + struct.pack(">I", first)
    found[first : first + 2] = struct.pack(">H", count)
    for at in range(first + 2, first + 2 + 12 * count, 12):
        tag, kind, number, value = struct.unpack("<HHI4s", raw[at : at + 12])
        size = {3: 2, 4: 4}.get(kind, 1)
        if number * size <= 4:
            value = b"".join(value[i : i + size][::-1] for i in range(0, 4, size))
        else:
            (place,) = struct.unpack("<I", value)
            value = struct.pack(">I", place)
            for i in range(place, place + number * size, size):
                found[i : i + size] = raw[i : i + size][::-1]
        found[at : at + 12] = struct.pack(">HHI4s", tag, kind, number, value)
    return bytes(found)


def test_both_orders_of_bytes() -> None:
    for form, raw, usual in WRITTEN:
        if form == "TIFF" and usual:
            assert tiff_size(io.BytesIO(swapped(raw))) == tiff_size(io.BytesIO(raw))


def test_a_webp_that_ends_early_is_left_to_pillow() -> None:
    """Its EXIF stands behind the pixels."""
    raw = next(raw for form, raw, _ in WRITTEN if form == "WEBP")
    assert webp_size(io.BytesIO(raw)) is not None
    assert [webp_size(io.BytesIO(raw[:end])) for end in range(0, len(raw), 7)] == [None] * (
        -(-len(raw) // 7)
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", SIZES)
def test_broken_bytes_are_no_other_size(form: str) -> None:
    """Where both say something they say the same; hardly anything is taken that Pillow refuses."""
    files, dice = [raw for one, raw, usual in WRITTEN if one == form and usual], random.Random(form)
    taken = refused = 0
    for _ in range(400):
        broken = bytearray(dice.choice(files))
        for _ in range(dice.randrange(1, 4)):
            broken[dice.randrange(min(len(broken), 200))] = dice.randrange(256)
        found, theirs = SIZES[form](io.BytesIO(broken)), of_pillow(bytes(broken))
        if found is not None and theirs is not None:
            assert found == theirs
        taken += found is not None
        refused += found is not None and theirs is None
    assert taken > 50
    assert refused <= {"TIFF": 0.05, "WEBP": 0.3}[form] * taken, (refused, taken)
