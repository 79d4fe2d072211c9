"""Sizes of pictures come from headers, and are those of the pictures that are decoded."""

import io
import random
import struct
from errno import EIO
from typing import Any

import pytest
from PIL import Image, ImageOps, PngImagePlugin

from megatron_hdp.data.media import MediaError, PictureSize, size_of_picture
from tests.data.media.drawn import KINDS, ORIENTATION, TURNED, chunk, drawn, saved


def size_of(raw: bytes, **limits: int) -> PictureSize:
    return size_of_picture(io.BytesIO(raw), "a.jpg", **limits)


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_is_that_of_the_picture_that_is_decoded(kind: str) -> None:
    for orientation in range(1, 9) if kind in TURNED else (1,):
        raw = saved(drawn(30, 41), kind, orientation)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(raw)))
        width, height = upright.size
        assert size_of(raw) == PictureSize(height, width)
        assert (height, width) == ((41, 30) if orientation > 4 else (30, 41))


def test_a_png_is_not_decoded_and_may_say_at_its_end_how_it_lies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    plain = saved(drawn(30, 41), "png")
    assert plain.endswith(end := chunk(b"IEND", b""))
    behind = plain[: -len(end)] + chunk(b"eXIf", exif.tobytes()[6:]) + end
    assert size_of(behind) == PictureSize(41, 30)

    def refuse(image: object) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", refuse)
    assert size_of(plain) == PictureSize(30, 41)
    assert size_of(plain[: len(plain) // 2]) == PictureSize(30, 41)
    with pytest.raises(AssertionError):
        size_of(behind)


@pytest.mark.parametrize("how", [{}, {"lossless": True}, {"icc_profile": b"p"}, {"xmp": b"x"}])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize("sides", [(1, 1), (30, 41), (1000, 3), (2, 16_383)])
def test_plain_webp_is_not_read_whole(
    how: dict[str, Any], mode: str, sides: tuple[int, int]
) -> None:
    stream = io.BytesIO()
    drawn(*sides).convert(mode).save(stream, "WEBP", **how)
    raw = stream.getvalue()
    assert size_of(raw) == PictureSize(*sides)
    if "xmp" not in how:
        assert size_of(raw[:40]) == PictureSize(*sides)
        with pytest.raises(MediaError, match="expected at most"):
            size_of(raw, most_pixels=sides[0] * sides[1] - 1)


@pytest.mark.parametrize("form", ["GIF", "TIFF", "WEBP", "PNG", "AVIF"])
def test_of_several_frames_the_first_one_is_the_picture(form: str) -> None:
    frames = [drawn(30, 41, seed).convert("RGB") for seed in range(3)]
    stream = io.BytesIO()
    frames[0].save(stream, form, save_all=True, append_images=frames[1:])
    assert size_of(stream.getvalue()) == PictureSize(30, 41)


@pytest.mark.filterwarnings("ignore:Image size")  # between Pillow's two limits
@pytest.mark.parametrize("sides", [(9_000, 9_000), (12_000, 12_000), (60_000, 60_000)])
def test_a_bomb_is_refused(sides: tuple[int, int]) -> None:
    head = struct.pack(">II5B", *sides, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    with pytest.raises(MediaError, match=r"a\.jpg: .* pixels, expected at most 67,108,864"):
        size_of(bomb)


def test_limits_are_of_both_sides() -> None:
    raw = saved(drawn(30, 41), "jpeg")
    assert size_of(raw, most_pixels=30 * 41)
    with pytest.raises(MediaError, match="30 x 41 pixels, expected at most 1,229"):
        size_of(raw, most_pixels=30 * 41 - 1)


@pytest.mark.parametrize("raw", [b"", b"{}", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"<svg/>", b"\xff\xd8"])
def test_what_is_no_picture_is_refused(raw: bytes) -> None:
    with pytest.raises(MediaError, match="no picture with a whole header, expected one of JPEG"):
        size_of(raw)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TURNED)
def test_broken_bytes_give_a_size_or_a_sentence(kind: str) -> None:
    raw, dice = saved(drawn(30, 41), kind, 6), random.Random(kind)
    refused = 0
    for _ in range(60):
        broken = bytearray(raw[: dice.randrange(len(raw))] if dice.random() < 0.3 else raw)
        for _ in range(dice.randrange(6)):
            if broken:
                broken[dice.randrange(min(len(broken), 400))] = dice.randrange(256)
        try:
            size_of(bytes(broken))
        except MediaError as error:
            refused += 1
            assert str(error).startswith("a.jpg: found ")
    assert refused


def test_a_disk_that_fails_is_no_damaged_picture() -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(EIO, "no disk")

    with pytest.raises(OSError, match="no disk"):
        size_of_picture(Failing(), "a.jpg")
