"""Text and conversations that become tokens as they are drawn: records found by number, decoded.

Design: `docs/design/text.md`.
"""

from megatron_hdp.data.on_the_fly.decoder import Decoder, lengths_of
from megatron_hdp.data.on_the_fly.estimate import TextEstimate, open_estimate
from megatron_hdp.data.on_the_fly.record_index import RecordIndex
from megatron_hdp.data.on_the_fly.source_files import SourceFiles

__all__ = [
    "Decoder",
    "RecordIndex",
    "SourceFiles",
    "TextEstimate",
    "lengths_of",
    "open_estimate",
]
