"""Pictures and sounds of sources: sizes from headers, values from bytes, where both lie."""

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
from megatron_hdp.data.media.settings import DECODER, MediaSettings, PictureSettings, settings_of
from megatron_hdp.data.media.sizes import (
    FORMATS,
    MOST_PIXELS,
    MediaError,
    PictureSize,
    size_of_picture,
)
from megatron_hdp.data.media.stored import (
    Decoded,
    MediaFiles,
    StoredItem,
    StoredPicture,
    StoredSound,
    bytes_of_item,
    decoded,
    listed_items,
    section,
    stored_item,
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
    "MediaError",
    "MediaFiles",
    "MediaSettings",
    "PictureSettings",
    "PictureSize",
    "StoredItem",
    "StoredPicture",
    "StoredSound",
    "bytes_of_item",
    "concatenate_items",
    "decoded",
    "listed_items",
    "patches_of_picture",
    "section",
    "settings_of",
    "size_of_picture",
    "stored_item",
]
