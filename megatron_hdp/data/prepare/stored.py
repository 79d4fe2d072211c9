"""The prepared sources in a folder of caches, by the names of their files."""

import re
from pathlib import Path

import orjson

from megatron_hdp.data.cache_use import StoredCache

MAIN, MANIFEST, LOCK, WORK = ".bin", ".json", ".lock", ".work"
"""Suffixes: of the tokens, which are the main file, and of what lies beside them."""
SUFFIXES = {"text": (MAIN, ".idx"), "chat": (MAIN, ".idx", ".spans")}
"""Those of what is made, by the kind of the source."""
KEY_DIGITS = 16

_KNOWN = (MANIFEST, LOCK, WORK, *SUFFIXES["chat"])
_NAME = re.compile(
    rf"(.+-[0-9a-f]{{{KEY_DIGITS}}})(?:(?:{'|'.join(map(re.escape, _KNOWN))})|.*\.tmp\d+.*)"
)


def stored_sources(folder: Path) -> list[StoredCache]:
    """Return the prepared sources in a folder, also those that were never finished, by name.

    What only has the name of one is none: it has neither a lock nor such a manifest.
    """
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if match := _NAME.fullmatch(path.name):
            found.setdefault(match[1], []).append(path)
    stored = (_stored(folder / name, paths) for name, paths in found.items())
    return [one for one in stored if one.lock.exists() or _is_manifest(one.parts[0])]


def _stored(base: Path, paths: list[Path]) -> StoredCache:
    main, manifest, lock = (Path(f"{base}{suffix}") for suffix in (MAIN, MANIFEST, LOCK))
    others = [path for path in paths if path not in (main, manifest, lock)]
    # without the manifest the others are not there
    return StoredCache(base.name, main, lock, (manifest, *others))


def _is_manifest(path: Path) -> bool:
    try:
        found = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return False
    return isinstance(found, dict) and found.keys() >= {"source", "tokenizer", "counts", "sizes"}
