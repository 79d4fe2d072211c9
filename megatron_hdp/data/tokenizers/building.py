"""From what a user writes to a tokenizer, or to what its ids depend on."""

import importlib.metadata
import os

from megatron_hdp.data.tokenizers.byte_tokenizer import ByteTokenizer
from megatron_hdp.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megatron_hdp.data.tokenizers.hugging_face_folder import folder_identity
from megatron_hdp.data.tokenizers.interface import Tokenizer
from megatron_hdp.data.tokenizers.tiktoken_tokenizer import TiktokenTokenizer

_SPECIFICATIONS = "byte, hf:PATH (a Hugging Face tokenizer) or tiktoken:NAME"


def build_tokenizer(specification: str) -> Tokenizer:
    """Make the tokenizer of ``byte``, ``hf:PATH`` or ``tiktoken:NAME``.

    Raises:
        ValueError: the specification is malformed, or the tokenizer cannot be loaded.
        ImportError: its library is not installed.
    """
    if specification == "byte":
        return ByteTokenizer()
    kind, _, name = specification.partition(":")
    if kind == "hf" and name:
        return HuggingFaceTokenizer(name)
    if kind == "tiktoken" and name:
        return TiktokenTokenizer(name)
    raise ValueError(f"tokenizer {specification!r}: expected {_SPECIFICATIONS}")


def tokenizer_identity(specification: str) -> str:
    """Return what the ids of a tokenizer depend on: its contents, or name and version.

    Raises:
        ValueError, ImportError: as `build_tokenizer`.
    """
    kind, _, name = specification.partition(":")
    if kind == "hf" and os.path.isdir(name):
        return f"hf:{folder_identity(name)}"
    tokenizer = build_tokenizer(specification)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return f"hf:{tokenizer.identity()}"
    if isinstance(tokenizer, TiktokenTokenizer):
        return f"{specification}@{importlib.metadata.version('tiktoken')}"
    return specification
