"""What a Hugging Face tokenizer's folder says without ``transformers``, which takes seconds."""

import fnmatch
import os
from collections.abc import Mapping
from typing import Any

import orjson

from megatron_hdp.data.extras import import_extra
from megatron_hdp.data.hashes import hash_of_bytes, hash_of_file

_FILES = (
    *("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "*.model", "*.tiktoken", "*.bpe", "*.jinja", "*.py", "tekken.json"),
    "config.json",
)
"""What transformers reads of a tokenizer's folder, which may also hold gigabytes of weights."""


def folder_identity(folder: str) -> str:
    """Return a hash over what decides ids and templates; weights beside it do not count."""
    names = [
        name
        for name in sorted(os.listdir(folder))
        if any(fnmatch.fnmatch(name, pattern) for pattern in _FILES)
        and os.path.isfile(os.path.join(folder, name))
    ]
    parts = [f"{name}\0{hash_of_file(os.path.join(folder, name))}\n" for name in names]
    return hash_of_bytes("".join(parts).encode())


_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
_LEGACY = {"added_tokens.json", "special_tokens_map.json"}
_SAYS_MORE = {"config.json", "additional_chat_templates"}
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


def whole_backend(folder: str) -> tuple[Any, dict[str, Any]] | None:
    """Return the Rust tokenizer and the settings of a folder whose files say all.

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
    more = names & (_SAYS_MORE if declared is not None else _SAYS_MORE | _LEGACY)
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
    tokenizers = import_extra("tokenizers", f"tokenizer hf:{folder}", "tokenizers")
    try:
        return tokenizers.Tokenizer.from_file(file), config
    except Exception as error:  # the library raises no other class
        raise ValueError(
            f"tokenizer hf:{folder} cannot be loaded: expected what the library tokenizers saved "
            f"in {file} ({error})"
        ) from error


def template_of(folder: str, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template that lies in a folder, or several by name."""
    path = os.path.join(folder, "chat_template.jinja")
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as stream:
            return stream.read()
    found = config.get("chat_template")
    return {one["name"]: one["template"] for one in found} if isinstance(found, list) else found


def backend_of(tokenizer: Any) -> Any:
    """Return the Rust tokenizer of one of ``transformers`` that adds nothing to it, or None."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.encode_special_tokens:
        return None
    methods = ("__call__", "encode", "_encode_plus", "_batch_encode_plus")
    found = [getattr(type(tokenizer), name) for name in methods if hasattr(tokenizer, name)]
    own = [one for one in found if not one.__module__.startswith("transformers.tokenization_")]
    return None if own else backend


def _json(path: str) -> dict[str, Any]:
    with open(path, "rb") as stream:
        raw = stream.read()
    try:
        found = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON, expected a tokenizer's ({error})") from error
    return found if isinstance(found, dict) else {}
