"""Pictures of sources: sizes from their headers, patches from their bytes."""

from megatron_hdp.data.media.pictures import patches_of_picture
from megatron_hdp.data.media.sizes import (
    FORMATS,
    MOST_PIXELS,
    PictureError,
    PictureSize,
    size_of_picture,
)

__all__ = [
    "FORMATS",
    "MOST_PIXELS",
    "PictureError",
    "PictureSize",
    "patches_of_picture",
    "size_of_picture",
]
