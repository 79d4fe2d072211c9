"""From documents on disk to sequences, steps, and one rank's part of a step."""

from megatron_hdp.data.document_index import DocumentIndex, read_document_index
from megatron_hdp.data.index_file import TokenFileError, TokenFileNotFoundError
from megatron_hdp.data.micro_batch import RankMicroBatch, padding_micro_batch, read_micro_batch
from megatron_hdp.data.order import DataOrder
from megatron_hdp.data.sampler import Step, StepSampler
from megatron_hdp.data.sequences import Sequences
from megatron_hdp.data.shuffles import LATEST_ORDER
from megatron_hdp.data.token_file import TokenFile, TokenReader
from megatron_hdp.data.tokenizers import ByteTokenizer, Tokenizer, build_tokenizer

__all__ = [
    "LATEST_ORDER",
    "ByteTokenizer",
    "DataOrder",
    "DocumentIndex",
    "RankMicroBatch",
    "Sequences",
    "Step",
    "StepSampler",
    "TokenFile",
    "TokenFileError",
    "TokenFileNotFoundError",
    "TokenReader",
    "Tokenizer",
    "build_tokenizer",
    "padding_micro_batch",
    "read_document_index",
    "read_micro_batch",
]
