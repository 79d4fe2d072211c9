"""What a source says of its pictures: how they are resized, and what stands for one in a text."""

from dataclasses import dataclass, replace

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.spec import MediaSpec
from megatron_hdp.media import ENCODERS, Resizing

DECODER = "pillow"
"""What decodes and resizes; another one would give other bits."""
_QWEN = "<|image_pad|>", "<|vision_start|>{}<|vision_end|>", ""
_LLAVA = "<image>", "{}", "\n"


@dataclass(frozen=True)
class PictureSettings:
    """Of one source."""

    resizing: Resizing
    placeholder: str
    """The token that stands for a picture."""
    written: str
    """What a picture is in a text."""
    written_part: str
    """The same, where it is a part of a message: what follows stands behind it."""
    most_file_pixels: int

    @classmethod
    def of(cls, spec: MediaSpec) -> "PictureSettings":
        """Return what a declaration means.

        Raises:
            ValueError: limits that the encoder has not, or that exclude each other.
        """
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

    def rows(self, heights: Int64Array, widths: Int64Array) -> Int64Array:
        """Return the rows of a picture of each size, ``[sizes]``.

        Raises:
            ValueError: the sides of one are too far apart.
        """
        return self.resizing.patches_of(heights, widths) // self.resizing.merge**2
