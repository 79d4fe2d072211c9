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

    @property
    def chat_template(self) -> str | None:
        """The Jinja template that comes with the tokenizer and writes conversations as text."""

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of special tokens by the names that chat templates give them: ``bos_token`` ..."""

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text; of an unknown one the id that stands for such."""

    def tokenize_markup(self, text: str) -> tuple[Int64Array, Int64Array]:
        """Return the ids of a text that may hold special tokens, and where each of them begins.

        Special tokens written in the text become their ids; none is added. Places count characters
        and never fall.

        Raises:
            ValueError: the tokenizer does not tell places.
        """


class ByteTokenizer:
    """The 256 byte values and one end-of-document id: 257 entries, nothing to download."""

    vocab_size = 257
    eod = 256
    chat_template: str | None = None

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

    @property
    def special_tokens(self) -> dict[str, str]:
        """Return none: the end-of-document id has no text."""
        return {}

    def id_of(self, token: str) -> int | None:
        """Return the byte of a text of one byte."""
        raw = token.encode("utf-8", errors="replace")
        return raw[0] if len(raw) == 1 else None

    def tokenize_markup(self, text: str) -> tuple[Int64Array, Int64Array]:
        """Return the bytes; those of one character begin where it does."""
        ids = self.tokenize(text)
        return ids, np.cumsum(ids & 0xC0 != 0x80, dtype=np.int64) - 1


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

    @property
    def chat_template(self) -> str | None:
        """Return the template of ``chat_template.jinja`` or ``tokenizer_config.json``.

        Raises:
            ValueError: there are several and none is named ``default``.
        """
        found = self._tokenizer.chat_template
        if not isinstance(found, dict):
            return None if found is None else str(found)
        if "default" not in found:
            raise ValueError(
                f"the tokenizer has chat templates named {', '.join(sorted(found))}, expected one "
                "named default: give the one to use as a file"
            )
        return str(found["default"])

    @property
    def special_tokens(self) -> dict[str, str]:
        """Return those that the tokenizer names."""
        named = self._tokenizer.special_tokens_map
        return {name: str(text) for name, text in named.items() if not isinstance(text, list)}

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text, or of the unknown token if there is one."""
        found = self._tokenizer.convert_tokens_to_ids(token)
        return None if found is None else int(found)

    def tokenize_markup(self, text: str) -> tuple[Int64Array, Int64Array]:
        """Return ids and first characters, as the library tells them."""
        if not self._tokenizer.is_fast:
            raise ValueError(
                f"tokenizer {type(self._tokenizer).__name__} does not tell where tokens begin: "
                "expected a fast one, with a tokenizer.json in its folder"
            )
        found = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        places = np.asarray(found["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        ids = np.asarray(found["input_ids"], dtype=np.int64)
        return ids, np.maximum.accumulate(places[:, 0])


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
        self.chat_template: str | None = None

    def tokenize(self, text: str) -> Int64Array:
        """Return the ids of a text; special tokens in it are read as plain text."""
        return np.asarray(self._encoding.encode_ordinary(text), dtype=np.int64)

    def tokenize_bytes(self, raw: bytes) -> Int64Array:
        """Return the ids of UTF-8 text; undecodable bytes become U+FFFD."""
        return self.tokenize(raw.decode("utf-8", errors="replace"))

    def detokenize(self, tokens: Int64Array | list[int]) -> str:
        """Return the text of ids."""
        return str(self._encoding.decode(list(map(int, tokens))))

    @property
    def special_tokens(self) -> dict[str, str]:
        """Return the text of the end-of-document id."""
        return {"eos_token": self.detokenize([self.eod])}

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text."""
        try:
            return int(self._encoding.encode_single_token(token))
        except KeyError:
            return None

    def tokenize_markup(self, text: str) -> tuple[Int64Array, Int64Array]:
        """Return ids and first characters; a token in the middle of one begins where it does."""
        ids = self._encoding.encode(text, allowed_special="all")
        _, places = self._encoding.decode_with_offsets(ids)
        return np.asarray(ids, dtype=np.int64), np.asarray(places, dtype=np.int64)


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
