"""Tokenizers behind one small protocol: bytes without any dependency, Hugging Face and tiktoken."""

import fnmatch
import importlib
import importlib.metadata
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from megatron_hdp.data.content import hash_of_bytes, hash_of_files
from megatron_hdp.data.index_file import Int64Array
from megatron_hdp.data.remembered_words import RememberedWords, ascii_pattern, heeds_surroundings

_SPECIFICATIONS = "byte, hf:PATH (a Hugging Face tokenizer) or tiktoken:NAME"


class TokenBatch(NamedTuple):
    """The ids of several documents, one after the other."""

    ids: npt.NDArray[np.integer]
    lengths: Int64Array
    """Tokens of each document."""


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

    def tokenize_batch(self, documents: Sequence[str | bytes]) -> TokenBatch:
        """Return the ids of documents: of each as `tokenize`, `tokenize_bytes` of bytes give."""

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

    def tokenize_batch(self, documents: Sequence[str | bytes]) -> TokenBatch:
        """Return the bytes of all documents."""
        raws = [
            one.encode("utf-8", "replace") if isinstance(one, str) else one for one in documents
        ]
        ids = np.frombuffer(b"".join(raws), dtype=np.uint8)
        return TokenBatch(ids, np.fromiter(map(len, raws), np.int64, len(raws)))

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
    """A tokenizer of the ``transformers`` library, by folder or model name.

    Ids are those that the library gives. They come from the Rust tokenizer behind it where it adds
    nothing of its own; then other processes that get this object do without the library, which
    takes seconds to import, and so does this one where the folder says all.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._backend: Any = None
        self._backend, eos_token = _whole_backend(path) or (None, None)
        if self._backend is None:
            self._backend, eos_token = _backend_of(self._tokenizer), self._tokenizer.eos_token
        if eos_token is None:
            raise ValueError(
                f"tokenizer hf:{path} has no end-of-text token, expected one to end documents "
                "with: set eos_token in its tokenizer_config.json"
            )
        if self._backend is None:
            self.vocab_size = len(self._tokenizer)
            self.eod = int(self._tokenizer.eos_token_id)
            return
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size = int(self._backend.get_vocab_size(with_added_tokens=True))
        self.eod = int(self._backend.token_to_id(eos_token))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is made again where it is needed."""
        made = ("_tokenizer", "_words")
        return {name: value for name, value in vars(self).items() if name not in made}

    @cached_property
    def _tokenizer(self) -> Any:
        """The library's own object."""
        transformers = _import_extra("transformers", f"hf:{self._path}")
        try:
            return transformers.AutoTokenizer.from_pretrained(self._path)
        except Exception as error:  # Rust has no other class for what a file lacks
            raise ValueError(
                f"tokenizer hf:{self._path} cannot be loaded: expected the folder of a Hugging "
                f"Face tokenizer or the name of a model that can be downloaded ({error})"
            ) from error

    def tokenize(self, text: str) -> Int64Array:
        """Return the ids of a text without special tokens."""
        return self.tokenize_batch([text]).ids.astype(np.int64)

    def tokenize_bytes(self, raw: bytes) -> Int64Array:
        """Return the ids of UTF-8 text; undecodable bytes become U+FFFD."""
        return self.tokenize_batch([raw]).ids.astype(np.int64)

    def tokenize_batch(self, documents: Sequence[str | bytes]) -> TokenBatch:
        """Return the ids of documents; Rust takes as many threads as RAYON_NUM_THREADS says."""
        texts = _texts(documents)
        if self._backend is None:
            settings = {"add_special_tokens": False, "return_attention_mask": False}
            return _batch(self._tokenizer(texts, verbose=False, **settings)["input_ids"])
        words = self._words
        parts = [[text] if words is None else words.parts_of(text) for text in texts]
        asked = [part for one in parts for part in one if isinstance(part, str)]
        found = iter(self._backend.encode_batch_fast(asked, add_special_tokens=False))
        ids = (
            (next(found).ids if isinstance(part, str) else part for part in one) for one in parts
        )
        return _batch([list(chain.from_iterable(one)) for one in ids])

    @cached_property
    def _words(self) -> RememberedWords | None:
        """A shorter way to the same ids, for most text of most tokenizers."""
        model = self._backend.model
        if type(model).__name__ != "BPE" or model.dropout:
            return None
        parts = [self._backend.normalizer, self._backend.pre_tokenizer]
        pattern = ascii_pattern(*(part and orjson.loads(part.__getstate__()) for part in parts))
        added = self._backend.get_added_tokens_decoder().values()
        if pattern is None or any(map(_heeds_surroundings, added)):
            return None
        return RememberedWords(
            pattern,
            lambda word: [token.id for token in model.tokenize(word)],
            [token.content for token in added],
        )

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

    def identity(self) -> str:
        """What its ids depend on: the contents of a folder, or what was downloaded."""
        if os.path.isdir(self._path):
            return _folder_identity(self._path)
        if self._backend is None:
            return f"{self._path}@transformers {importlib.metadata.version('transformers')}"
        template = str(getattr(self._tokenizer, "chat_template", None))
        return hash_of_bytes((self._backend.to_str() + template).encode())


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
        self._name = name
        self.vocab_size = int(self._encoding.n_vocab)
        self.eod = int(self._encoding.eot_token)
        self.chat_template: str | None = None

    def __reduce__(self) -> tuple[type["TiktokenTokenizer"], tuple[str]]:
        """Another process loads it by name."""
        return TiktokenTokenizer, (self._name,)

    def tokenize(self, text: str) -> Int64Array:
        """Return the ids of a text; special tokens in it are read as plain text."""
        return np.asarray(self._encoding.encode_ordinary(text), dtype=np.int64)

    def tokenize_bytes(self, raw: bytes) -> Int64Array:
        """Return the ids of UTF-8 text; undecodable bytes become U+FFFD."""
        return self.tokenize(raw.decode("utf-8", errors="replace"))

    def tokenize_batch(self, documents: Sequence[str | bytes]) -> TokenBatch:
        """Return the ids of documents, on as many threads as RAYON_NUM_THREADS says."""
        threads = int(os.environ.get("RAYON_NUM_THREADS") or available_cpus())
        texts = _texts(documents)
        return _batch(self._encoding.encode_ordinary_batch(texts, num_threads=threads))

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


def tokenizer_identity(specification: str) -> str:
    """Return what the ids of a tokenizer depend on: its contents, or name and version.

    Raises:
        ValueError, ImportError: as `build_tokenizer`.
    """
    kind, _, name = specification.partition(":")
    if kind == "hf" and os.path.isdir(name):
        return f"hf:{_folder_identity(name)}"
    tokenizer = build_tokenizer(specification)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return f"hf:{tokenizer.identity()}"
    if isinstance(tokenizer, TiktokenTokenizer):
        return f"{specification}@{importlib.metadata.version('tiktoken')}"
    return specification


def available_cpus() -> int:
    """Number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_FILES = (
    *("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "*.model", "*.tiktoken", "*.bpe", "*.jinja", "*.py", "tekken.json"),
    "config.json",
)
"""What transformers reads of a tokenizer's folder, which may also hold gigabytes of weights."""


def _folder_identity(folder: str) -> str:
    names = [
        name
        for name in sorted(os.listdir(folder))
        if any(fnmatch.fnmatch(name, pattern) for pattern in _FILES)
        and os.path.isfile(os.path.join(folder, name))
    ]
    return hash_of_files(folder, names)


_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
_SAYS_MORE = {"config.json", "added_tokens.json", "special_tokens_map.json"}
_SPECIAL = ("additional_special_tokens", "extra_special_tokens")
_HARMLESS = {
    *("tokenizer_class", "backend", "model_max_length", "clean_up_tokenization_spaces"),
    *("added_tokens_decoder", "chat_template", "padding_side", "name_or_path", "is_local"),
    *("local_files_only", "model_input_names", "truncation_side"),
}
_PLAIN = {
    **{"special": True, "normalized": False},
    **{"lstrip": False, "rstrip": False, "single_word": False},
}


def _whole_backend(folder: str) -> tuple[Any, str | None] | None:
    """Return the Rust tokenizer and end-of-text token of a folder whose two files say all.

    None where ``transformers`` would, or might, change what ``tokenizer.json`` says: another class,
    settings that are unknown here, special tokens that it would have to add.
    """
    names = set(os.listdir(folder)) if os.path.isdir(folder) else set()
    if not {"tokenizer.json", "tokenizer_config.json"} <= names:
        return None
    file = os.path.join(folder, "tokenizer.json")
    config, content = _json(os.path.join(folder, "tokenizer_config.json")), _json(file)
    added = {token["id"]: token for token in content.get("added_tokens", ())}
    declared = config.get("added_tokens_decoder")
    more = _SAYS_MORE & names - (set() if declared is None else _SAYS_MORE - {"config.json"})
    if config.get("tokenizer_class") not in _GENERIC or more:
        return None
    if any({"id": int(i), **token} != added.get(int(i)) for i, token in (declared or {}).items()):
        return None
    named = [value for key, value in config.items() if key.endswith("_token") and value is not None]
    for key in _SPECIAL:
        value = config.get(key) or []
        named += value.values() if isinstance(value, dict) else value
    others = set(config) - _HARMLESS - set(_SPECIAL)
    plain = {token["content"] for token in added.values() if _PLAIN.items() <= token.items()}
    if any(not key.endswith("_token") for key in others) or not plain.issuperset(map(str, named)):
        return None
    tokenizers = _import_extra("tokenizers", f"hf:{folder}")
    try:
        return tokenizers.Tokenizer.from_file(file), config.get("eos_token")
    except Exception as error:  # the library raises no other class
        raise ValueError(
            f"tokenizer hf:{folder} cannot be loaded: expected what the library tokenizers saved "
            f"in {file} ({error})"
        ) from error


def _backend_of(tokenizer: Any) -> Any:
    """Return the Rust tokenizer of one of ``transformers`` that adds nothing to it, or None."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.encode_special_tokens:
        return None
    methods = ("__call__", "encode", "_encode_plus", "_batch_encode_plus")
    found = [getattr(type(tokenizer), name) for name in methods if hasattr(tokenizer, name)]
    own = [one for one in found if not one.__module__.startswith("transformers.tokenization_")]
    return None if own else backend


def _heeds_surroundings(token: Any) -> bool:
    return heeds_surroundings(
        token.content, strips_right=token.rstrip, is_single_word=token.single_word
    )


def _json(path: str) -> dict[str, Any]:
    with open(path, "rb") as stream:
        raw = stream.read()
    try:
        found = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON, expected a tokenizer's ({error})") from error
    return found if isinstance(found, dict) else {}


def _texts(documents: Sequence[str | bytes]) -> list[str]:
    return [one if isinstance(one, str) else one.decode("utf-8", "replace") for one in documents]


def _batch(ids: Sequence[Iterable[int]]) -> TokenBatch:
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))  # type: ignore[arg-type]
    flat = np.fromiter(chain.from_iterable(ids), np.int32, int(lengths.sum()))
    return TokenBatch(flat, lengths)


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
