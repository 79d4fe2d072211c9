"""Tokenizers of Hugging Face: ids from Rust, by the batch, and what chat templates need."""

import importlib.metadata
import os
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import orjson

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.extras import import_extra
from megatron_hdp.data.hashes import hash_of_bytes
from megatron_hdp.data.tokenizers.hugging_face_folder import (
    backend_of,
    folder_identity,
    template_of,
    whole_backend,
)
from megatron_hdp.data.tokenizers.interface import TokenBatch, batch_of, texts_of
from megatron_hdp.data.tokenizers.remembered_words import (
    RememberedWords,
    ascii_pattern,
    heeds_surroundings,
)


class HuggingFaceTokenizer:
    """A tokenizer of the ``transformers`` library, by folder or model name.

    Ids are those that the library gives. They come from the Rust tokenizer behind it where it adds
    nothing of its own; then other processes that get this object do without the library, which
    takes seconds to import, and so does this one where the folder says all.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        if (path.startswith((".", "~", "/")) or path.count("/") > 1) and not os.path.isdir(path):
            raise ValueError(
                f"tokenizer hf:{path}: found no such folder, expected one with the files of a "
                "Hugging Face tokenizer: mend the path, or give the name of a model, OWNER/NAME"
            )
        self._backend: Any
        self._config: dict[str, Any] | None
        self._backend, self._config = whole_backend(path) or (backend_of(self._tokenizer), None)
        config = self._config
        eos_token = self._tokenizer.eos_token if config is None else config.get("eos_token")
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
        transformers = import_extra("transformers", f"tokenizer hf:{self._path}", "tokenizers")
        try:
            return transformers.AutoTokenizer.from_pretrained(self._path)
        except Exception as error:  # Rust has no other class for what a file lacks
            raise ValueError(
                f"tokenizer hf:{self._path} cannot be loaded: expected the folder of a Hugging "
                f"Face tokenizer or the name of a model that can be downloaded ({error})"
            ) from error

    def tokenize_batch(self, documents: Sequence[str | bytes]) -> TokenBatch:
        """Return the ids of documents; Rust takes as many threads as RAYON_NUM_THREADS says."""
        texts = texts_of(documents)
        if self._backend is None:
            settings = {"add_special_tokens": False, "return_attention_mask": False}
            return batch_of(self._tokenizer(texts, verbose=False, **settings)["input_ids"])
        words = self._words
        parts = [[text] if words is None else words.parts_of(text) for text in texts]
        asked = [part for one in parts for part in one if isinstance(part, str)]
        found = iter(self._backend.encode_batch_fast(asked, add_special_tokens=False))
        ids = (
            (next(found).ids if isinstance(part, str) else part for part in one) for one in parts
        )
        return batch_of([list(chain.from_iterable(one)) for one in ids])

    @cached_property
    def _words(self) -> RememberedWords | None:
        """A shorter way to the same ids, for most text of most tokenizers."""
        model = self._backend.model
        if type(model).__name__ != "BPE" or model.dropout:
            return None
        parts = [self._backend.normalizer, self._backend.pre_tokenizer]
        pattern = ascii_pattern(*(part and orjson.loads(part.__getstate__()) for part in parts))
        added = self._backend.get_added_tokens_decoder().values()
        if pattern is None or any(map(heeds_surroundings, added)):
            return None
        return RememberedWords(
            pattern,
            lambda word: [token.id for token in model.tokenize(word)],
            [token.content for token in added],
        )

    @property
    def chat_template(self) -> str | None:
        """Return the template of ``chat_template.jinja`` or ``tokenizer_config.json``.

        Raises:
            ValueError: there are several and none is named ``default``.
        """
        if self._config is not None:
            found = template_of(self._path, self._config)
        else:
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
        if self._config is not None:
            named = {name: text for name, text in self._config.items() if name.endswith("_token")}
        else:
            named = self._tokenizer.special_tokens_map
        return {name: str(text) for name, text in named.items() if isinstance(text, str)}

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text, or of the unknown token if there is one."""
        if self._config is None:
            found = self._tokenizer.convert_tokens_to_ids(token)
        else:
            found = self._backend.token_to_id(token)
            if found is None and (unknown := self._config.get("unk_token")) is not None:
                found = self._backend.token_to_id(unknown)
        return None if found is None else int(found)

    def tokenize_markup(self, text: str) -> tuple[Int64Array, Int64Array]:
        """Return ids and first characters, as the library tells them."""
        if self._backend is not None:
            found = self._backend.encode(text, add_special_tokens=False)
            ids, offsets = found.ids, found.offsets
        elif self._tokenizer.is_fast:
            settings = {"add_special_tokens": False, "return_offsets_mapping": True}
            found = self._tokenizer(text, verbose=False, **settings)
            ids, offsets = found["input_ids"], found["offset_mapping"]
        else:
            raise ValueError(
                f"tokenizer {type(self._tokenizer).__name__} does not tell where tokens begin: "
                "expected a fast one, with a tokenizer.json in its folder"
            )
        begins = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)[:, 0]
        return np.asarray(ids, dtype=np.int64), np.maximum.accumulate(begins)

    def identity(self) -> str:
        """What its ids depend on: the contents of a folder, or what was downloaded."""
        if os.path.isdir(self._path):
            return folder_identity(self._path)
        if self._backend is None:
            return f"{self._path}@transformers {importlib.metadata.version('transformers')}"
        template = str(getattr(self._tokenizer, "chat_template", None))
        return hash_of_bytes((self._backend.to_str() + template).encode())
