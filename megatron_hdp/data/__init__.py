"""From documents on disk to sequences, steps, and one rank's part of a step.

Here are files of tokens, tokenizers and the order of an epoch; the rooms in it do the rest.
"""

from megatron_hdp.data.index_file import TokenFileError, TokenFileNotFoundError
from megatron_hdp.data.order import Continuation, DataOrder, SourceOrder
from megatron_hdp.data.shuffles import LATEST_ORDER
from megatron_hdp.data.spec import SourceSpec
from megatron_hdp.data.token_file import TokenFile, TokenReader, read_document_index
from megatron_hdp.data.token_writer import TokenWriter

__all__ = [
    "LATEST_ORDER",
    "Continuation",
    "DataOrder",
    "SourceOrder",
    "SourceSpec",
    "TokenFile",
    "TokenFileError",
    "TokenFileNotFoundError",
    "TokenReader",
    "TokenWriter",
    "read_document_index",
]
