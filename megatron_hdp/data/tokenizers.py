"""Tokenizers behind one small protocol: bytes without any dependency, Hugging Face and tiktoken."""

import importlib
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from megatron_hdp.data.index_file import Int64Array

_SPECIFICATIONS = "byte, hf:PATH (a Hugging Face tokenizer) or tiktoken:NAME"


class Tokenizer(Protocol):
    """What preprocessing and training need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special tokens included."""

    @property
    def eod(self) -> int:
        """The id that ends a document."""

    def tokenize(self, text: str) -> Int64Array:
        """Return the ids of a text; no special token is added."""

    def tokenize_bytes(self, raw: bytes) -> Int64Array:
        """Return the ids of a document as it lies on disk, UTF-8 where text is needed."""

    def detokenize(self, tokens: Int64Array | list[int]) -> str:
        """Return the text of ids."""


class ByteTokenizer:
    """The 256 byte values and one end-of-document id: 257 entries, nothing to download."""

    vocab_size = 257
    eod = 256

    def tokenize(self, text: str) -> Int64Array:
        """Return the text's UTF-8 bytes; what has no encoding (lone surrogates) becomes ``?``."""
        return self.tokenize_bytes(text.encode("utf-8", errors="replace"))

    def tokenize_bytes(self, raw: bytes) -> Int64Array:
        """Return the bytes themselves."""
        return np.frombuffer(raw, dtype=np.uint8).astype(np.int64)

    def detokenize(self, tokens: Int64Array | list[int]) -> str:
        """Return the text of the bytes; end-of-document ids are left out."""
        kept = [token for token in tokens if token != self.eod]
        return bytes(kept).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer of the ``transformers`` library, by folder or model name."""

    def __init__(self, path: str) -> None:
        transformers = _import_extra("transformers", f"hf:{path}")
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"tokenizer hf:{path} cannot be loaded: expected the folder of a Hugging Face "
                f"tokenizer or the name of a model that can be downloaded ({error})"
            ) from error
        if self._tokenizer.eos_token_id is None:
            raise ValueError(
                f"tokenizer hf:{path} has no end-of-text token, expected one to end documents "
                "with: set eos_token in its tokenizer_config.json"
            )
        self.vocab_size = len(self._tokenizer)
        self.eod = int(self._tokenizer.eos_token_id)

    def tokenize(self, text: str) -> Int64Array:
        """Return the ids of a text without special tokens."""
        ids = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return np.asarray(ids, dtype=np.int64)

    def tokenize_bytes(self, raw: bytes) -> Int64Array:
        """Return the ids of UTF-8 text; undecodable bytes become U+FFFD."""
        return self.tokenize(raw.decode("utf-8", errors="replace"))

    def detokenize(self, tokens: Int64Array | list[int]) -> str:
        """Return the text of ids."""
        return str(self._tokenizer.decode(list(map(int, tokens))))


class TiktokenTokenizer:
    """An encoding of the ``tiktoken`` library, by name."""

    def __init__(self, name: str) -> None:
        tiktoken = _import_extra("tiktoken", f"tiktoken:{name}")
        if name not in tiktoken.list_encoding_names():
            raise ValueError(
                f"tokenizer tiktoken:{name} is unknown: expected one of "
                f"{', '.join(tiktoken.list_encoding_names())}"
            )
        try:
            self._encoding: Any = tiktoken.get_encoding(name)
        except OSError as error:  # its tables are downloaded at the first use
            raise ValueError(
                f"the tables of tokenizer tiktoken:{name} cannot be downloaded ({error}): fetch "
                "them on a machine with network access and set TIKTOKEN_CACHE_DIR to their folder"
            ) from error
        self.vocab_size = int(self._encoding.n_vocab)
        self.eod = int(self._encoding.eot_token)

    def tokenize(self, text: str) -> Int64Array:
        """Return the ids of a text; special tokens in it are read as plain text."""
        return np.asarray(self._encoding.encode_ordinary(text), dtype=np.int64)

    def tokenize_bytes(self, raw: bytes) -> Int64Array:
        """Return the ids of UTF-8 text; undecodable bytes become U+FFFD."""
        return self.tokenize(raw.decode("utf-8", errors="replace"))

    def detokenize(self, tokens: Int64Array | list[int]) -> str:
        """Return the text of ids."""
        return str(self._encoding.decode(list(map(int, tokens))))


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


def _import_extra(module: str, specification: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ModuleNotFoundError(
            f"tokenizer {specification} needs {module}, which is not installed: "
            "pip install 'megatron-hdp[tokenizers]'",
            name=module,
        ) from error
