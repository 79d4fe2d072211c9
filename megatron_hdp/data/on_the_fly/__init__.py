"""Text and conversations that become tokens as they are drawn: records found by number, decoded.

Design: `docs/design/text.md`.
"""

from megatron_hdp.data.on_the_fly.decoder import Decoded, DecodedRow, Decoder, lengths_of
from megatron_hdp.data.on_the_fly.estimate import TextEstimate, open_estimate
from megatron_hdp.data.on_the_fly.files import ChangedFileError, SourceFiles
from megatron_hdp.data.on_the_fly.records import RecordIndex

__all__ = [
    "ChangedFileError",
    "Decoded",
    "DecodedRow",
    "Decoder",
    "RecordIndex",
    "SourceFiles",
    "TextEstimate",
    "lengths_of",
    "open_estimate",
]
