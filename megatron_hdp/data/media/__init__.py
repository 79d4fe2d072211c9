"""Pictures of sources: sizes from their headers, patches from their bytes, where both lie."""

from megatron_hdp.data.media.items import (
    ITEM,
    MOST_BYTES,
    MOST_SIDE,
    SUFFIX,
    ItemPlace,
    Items,
    ItemsWriter,
    concatenate_items,
)
from megatron_hdp.data.media.pictures import patches_of_picture
from megatron_hdp.data.media.settings import DECODER, PictureSettings
from megatron_hdp.data.media.sizes import (
    FORMATS,
    MOST_PIXELS,
    PictureError,
    PictureSize,
    size_of_picture,
)
from megatron_hdp.data.media.stored import (
    Decoded,
    PictureFiles,
    StoredPicture,
    bytes_of_picture,
    decoded,
    listed_pictures,
    section,
)

__all__ = [
    "DECODER",
    "FORMATS",
    "ITEM",
    "MOST_BYTES",
    "MOST_PIXELS",
    "MOST_SIDE",
    "SUFFIX",
    "Decoded",
    "ItemPlace",
    "Items",
    "ItemsWriter",
    "PictureError",
    "PictureFiles",
    "PictureSettings",
    "PictureSize",
    "StoredPicture",
    "bytes_of_picture",
    "concatenate_items",
    "decoded",
    "listed_pictures",
    "patches_of_picture",
    "section",
    "size_of_picture",
]
