"""Tables of sequences: from documents to rows, kept in files that the processes of a node share.

Design: `docs/design/tables.md`.
"""

from megatron_hdp.data.tables.cache_file import TableCacheError
from megatron_hdp.data.tables.columns import TableFacts
from megatron_hdp.data.tables.cutting import LONG_SEQUENCE_POLICIES
from megatron_hdp.data.tables.open_source import count_documents, open_source, split_documents
from megatron_hdp.data.tables.table import SequenceTable

__all__ = [
    "LONG_SEQUENCE_POLICIES",
    "SequenceTable",
    "TableCacheError",
    "TableFacts",
    "count_documents",
    "open_source",
    "split_documents",
]
