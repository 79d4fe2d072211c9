"""What prepared data depends on, as one key: what the files hold, not where they lie."""

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import orjson

from megatron_hdp.data.formats import format_of
from megatron_hdp.data.hashes import change_of, hash_of_bytes, hash_of_file
from megatron_hdp.data.prepare.decoding import conversations_of, decoding_of
from megatron_hdp.data.prepare.shard_run import Tell
from megatron_hdp.data.spec import SourceSpec
from megatron_hdp.data.tokenizers import tokenizer_identity

FORMAT_VERSION = 2
"""Of what is prepared: a change that makes other tokens of the same files makes it another."""
_KEY_DIGITS = 16
_THREADS = 4


@dataclass(frozen=True)
class Content:
    """A file and what it holds."""

    path: str
    size: int
    mtime_ns: int
    hash: str


def contents_of(files: Sequence[str], known: Iterable[Content], tell: Tell) -> list[Content]:
    """Return what files hold; those of a known path, size and time are not read again.

    Raises:
        OSError: a file cannot be read.
    """
    hashes = {(one.path, one.size, one.mtime_ns): one.hash for one in known}

    def content(path: str) -> Content:
        path = os.path.abspath(path)
        found = os.stat(path)
        place = (path, found.st_size, found.st_mtime_ns)
        return Content(*place, hashes.get(place) or hash_of_file(path))

    contents = []
    with ThreadPoolExecutor(_THREADS) as pool:
        for one in pool.map(content, files):
            contents.append(one)
            tell(one.size)
    return contents


def require_unchanged(contents: Iterable[Content]) -> None:
    """Refuse files that were written while they were read.

    Raises:
        ValueError: names the first one.
    """
    for one in contents:
        found = os.stat(one.path)
        if (found.st_size, found.st_mtime_ns) != (one.size, one.mtime_ns):
            raise ValueError(
                f"{one.path} has changed while it was prepared "
                f"({change_of(one.size, one.mtime_ns, found)}), expected a file that stays: run "
                "again once it is complete"
            )


def recipe_of(spec: SourceSpec, kind: str, tokenizer: str) -> Mapping[str, Any]:
    """Return all but the files that the tokens of a source depend on.

    Raises:
        ValueError, ImportError: the tokenizer or the template cannot be read.
    """
    common = {
        "version": FORMAT_VERSION,
        "format": kind,
        "tokenizer": tokenizer_identity(tokenizer),
        "append_eod": spec.append_eod,
    }
    if kind == "text":
        return {**common, "key": spec.key}
    conversations = conversations_of(decoding_of(spec, kind, tokenizer))
    return {**common, "conversations": conversations.fingerprint()}


def key_of(recipe: Mapping[str, Any], contents: Iterable[Content], text_key: str | None) -> str:
    """Return what the files and what is done with them come to, in 16 digits."""
    parts = [(format_of(one.path, text_key, lines=False).name, one.hash) for one in contents]
    raw = orjson.dumps({**recipe, "files": parts}, option=orjson.OPT_SORT_KEYS)
    return hash_of_bytes(raw)[:_KEY_DIGITS]
