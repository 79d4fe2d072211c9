"""From a picture's bytes to patches: decoded, turned upright, in colours, resized, cut up.

The bits are those of the PIL processors of `transformers`, before they rescale and normalise.
"""

import io
from typing import Any

import numpy as np

from megatron_hdp.arrays import AnyArray
from megatron_hdp.data.extras import import_extra
from megatron_hdp.data.media.sizes import MOST_PIXELS, MediaError, opened
from megatron_hdp.media import Patches, Resizing

_COLOURS = 3
_BICUBIC = 3  # Pillow's number of it


def patches_of_picture(
    raw: bytes, name: str, resizing: Resizing, *, most_pixels: int = MOST_PIXELS
) -> Patches:
    """Return the patches of a picture, uint8; of a file of several pictures the first one's.

    What is transparent becomes white.

    Args:
        raw: the bytes of its file.
        name: what an error calls it.
        resizing: of the encoder.
        most_pixels: of height x width.

    Raises:
        MediaError: it is damaged, too large, no picture that is read here, or its sides are too
            far apart.
        ModuleNotFoundError: Pillow is not installed.
    """
    colours = upright_picture(raw, name, most_pixels)
    try:
        pixels = resized(colours, resizing)
    except ValueError as error:
        raise MediaError(f"{name}: {error}") from error
    if resizing.square is not None:
        pixels = _middle(pixels, resizing.square)
    return cut(pixels, resizing.patch, resizing.merge)


def upright_picture(raw: bytes, name: str, most_pixels: int) -> Any:
    """Return one of Pillow's pictures in colours, turned; arguments as of `patches_of_picture`.

    Raises:
        MediaError: as of `patches_of_picture`.
    """
    operations = import_extra("PIL.ImageOps", name, extra="media")
    with opened(io.BytesIO(raw), name, most_pixels) as image:
        image.load()
        operations.exif_transpose(image, in_place=True)
        return colours_of(image, name)


def colours_of(image: Any, name: str) -> Any:
    """Return one of Pillow's pictures in red, green and blue; what is transparent becomes white."""
    pillow = import_extra("PIL.Image", name, extra="media")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        over = image.convert("RGBA")
        white = pillow.new("RGBA", over.size, (255, 255, 255, 255))
        image = pillow.alpha_composite(white, over)
    return image.convert("RGB")


def resized(colours: Any, resizing: Resizing, num_frames: int = 1) -> AnyArray:
    """Return the pixels of a picture, or of a frame of so many, ``uint8 [height, width, colours]``.

    Raises:
        ValueError: its sides are too far apart.
    """
    width, height = colours.size
    sides = np.array([height]), np.array([width])
    (to_height,), (to_width,) = resizing.resized(*sides, num_frames)
    return np.asarray(colours.resize((int(to_width), int(to_height)), resample=_BICUBIC))


def _middle(pixels: AnyArray, side: int) -> AnyArray:
    """The square in the middle of a picture that is no smaller."""
    top, left = ((size - side) // 2 for size in pixels.shape[:2])
    return pixels[top : top + side, left : left + side]


def cut(pixels: AnyArray, patch: int, merge: int) -> Patches:
    """Return ``[height, width, colours]`` as patches; those of a row stand together."""
    h, w = (size // patch for size in pixels.shape[:2])
    parts = pixels[: h * patch, : w * patch].reshape(
        h // merge, merge, patch, w // merge, merge, patch, _COLOURS
    )
    values = np.ascontiguousarray(parts.transpose(0, 3, 1, 4, 6, 2, 5))
    return Patches(values.reshape(h * w, _COLOURS * patch * patch), (1, h, w))
