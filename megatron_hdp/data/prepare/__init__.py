"""Text and conversations become pairs of tokens: by workers, resumable, once for the same data.

Design: `docs/design/text.md`.
"""

from megatron_hdp.data.prepare.cache import Prepared, prepare, require_few_bad
from megatron_hdp.data.prepare.cache_key import recipe_of
from megatron_hdp.data.prepare.decoding import (
    Decoding,
    batches_of,
    conversations_of,
    decoding_of,
    rendered,
    text_key,
    tokens_of_texts,
)
from megatron_hdp.data.prepare.shards import Counts
from megatron_hdp.data.prepare.tokenising import progress_bar, write_pair

__all__ = [
    "Counts",
    "Decoding",
    "Prepared",
    "batches_of",
    "conversations_of",
    "decoding_of",
    "prepare",
    "progress_bar",
    "recipe_of",
    "rendered",
    "require_few_bad",
    "text_key",
    "tokens_of_texts",
    "write_pair",
]
