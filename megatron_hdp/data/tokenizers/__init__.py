"""Tokenizers behind one small interface: bytes, Hugging Face's and tiktoken's."""

from megatron_hdp.data.tokenizers.building import build_tokenizer, tokenizer_identity
from megatron_hdp.data.tokenizers.byte_tokenizer import ByteTokenizer
from megatron_hdp.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megatron_hdp.data.tokenizers.interface import TokenBatch, Tokenizer, available_cpus
from megatron_hdp.data.tokenizers.tiktoken_tokenizer import TiktokenTokenizer

__all__ = [
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "TiktokenTokenizer",
    "TokenBatch",
    "Tokenizer",
    "available_cpus",
    "build_tokenizer",
    "tokenizer_identity",
]
