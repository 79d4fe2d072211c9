"""Drawn pictures, in all formats and ways to lie that are read."""

import io
import zlib
from typing import Any

import numpy as np
from PIL import Image

ORIENTATION = 0x112
TURNED = ("jpeg", "progressive", "cmyk", "png", "webp", "tiff", "avif")
"""Kinds that can say how they lie."""
KINDS = (*TURNED, "grey", "16-bit", "palette", "alpha", "grey-alpha", "bits", "webp-alpha", "gif")
_SAVED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "jpeg": ("RGB", "JPEG", {}),
    "progressive": ("RGB", "JPEG", {"progressive": True, "quality": 60}),
    "cmyk": ("CMYK", "JPEG", {}),
    "png": ("RGB", "PNG", {}),
    "webp": ("RGB", "WEBP", {}),
    "tiff": ("RGB", "TIFF", {}),
    "avif": ("RGB", "AVIF", {"speed": 10}),
    "grey": ("L", "JPEG", {}),
    "16-bit": ("I;16", "PNG", {}),
    "palette": ("P", "PNG", {"transparency": 3}),
    "alpha": ("RGBA", "PNG", {}),
    "grey-alpha": ("LA", "PNG", {}),
    "bits": ("1", "PNG", {}),
    "webp-alpha": ("RGBA", "WEBP", {}),
    "gif": ("P", "GIF", {}),
}


def drawn(height: int, width: int, seed: int = 0) -> Image.Image:
    """Soft colours, lines and noise, RGBA."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 4), dtype=np.uint8), "RGBA")
    pixels = np.array(coarse.resize((width, height), Image.Resampling.BICUBIC))
    pixels[:: 2 + seed % 7] //= 2
    pixels[: height // 2, : width // 3] ^= rng.integers(
        0, 64, pixels[: height // 2, : width // 3].shape, dtype=np.uint8
    )
    return Image.fromarray(pixels, "RGBA")


def in_mode(picture: Image.Image, mode: str) -> Image.Image:
    if mode == "I;16":
        return Image.fromarray(np.array(picture.convert("L")).astype(np.uint16) * 257)
    if mode == "LA":
        return picture.convert("LA")
    return picture if mode == "RGBA" else picture.convert("RGB").convert(mode)


def saved(picture: Image.Image, kind: str, orientation: int = 1) -> bytes:
    """The bytes of a file."""
    mode, form, how = _SAVED[kind]
    if orientation != 1:
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        how = {**how, "exif": exif.tobytes() if form != "TIFF" else exif}
    stream = io.BytesIO()
    in_mode(picture, mode).save(stream, form, **how)
    return stream.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG."""
    checksum = zlib.crc32(kind + content).to_bytes(4, "big")
    return len(content).to_bytes(4, "big") + kind + content + checksum
