"""What is finished of a prepared source, in files that are whole or not there.

The manifest ``NAME.json`` is written last: without it, or with other sizes than it says, nothing is
prepared. In the folder ``NAME.work`` each finished shard has a pair and a mark.
"""

import glob
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from megatron_hdp.data import media, sides, sums
from megatron_hdp.data.hashes import hash_of_bytes, hash_of_file
from megatron_hdp.data.prepare.cache_key import Content
from megatron_hdp.data.prepare.shards import Counts, Shard
from megatron_hdp.files import note_opened, write_atomically

MAIN, MANIFEST, LOCK, WORK = ".bin", ".json", ".lock", ".work"
"""Suffixes: of the tokens, which are the main file, and of what lies beside them."""
SUFFIXES = {
    "text": (MAIN, ".idx", sums.SUFFIX),
    "chat": (MAIN, ".idx", ".spans", sums.SUFFIX),
    **dict.fromkeys(sides.KINDS, (MAIN, ".idx", ".spans", sides.SUFFIX, sums.SUFFIX)),
}
"""Those of what is made, by the kind of the source; rows with pictures have two more."""

_FILES, _CHECK = "files", "check"


def suffixes_of(kind: str, *, has_media: bool) -> tuple[str, ...]:
    """Return the suffixes of what is made of a source."""
    return (*SUFFIXES[kind], *([media.SUFFIX, media.INLINE_SUFFIX] if has_media else []))


class PreparedFiles:
    """Of one source, its files and what is done with them."""

    def __init__(self, folder: Path, name: str, suffixes: Sequence[str]) -> None:
        """Name what is made, besides the manifest with these suffixes."""
        self.prefix = os.path.join(folder, name)
        self._suffixes = suffixes
        self._work = self.prefix + WORK

    def path(self, suffix: str) -> Path:
        """A file of the source."""
        return Path(self.prefix + suffix)

    def counts(self) -> Counts | None:
        """What became of the documents, if all is finished; it is noted as opened now."""
        manifest = _read(self.path(MANIFEST))
        if manifest is None or manifest.get("sizes") != self._sizes():
            return None
        if not note_opened(self.path(MAIN)):
            return None
        return Counts(**manifest["counts"])

    def begin(self, contents: Sequence[Content]) -> None:
        """Remove what a killed process left half, and note the files' contents."""
        os.makedirs(self._work, exist_ok=True)
        self.clear()
        _write(f"{self._work}/{_FILES}.json", {_FILES: list(map(asdict, contents))})

    def clear(self) -> None:
        """Remove all that is half; nobody may be writing."""
        for start in (self.prefix, f"{self._work}/"):
            for path in glob.glob(f"{glob.escape(start)}*.tmp[0-9]*"):
                os.remove(path)

    def forget(self) -> None:
        """Remove finished shards, so that they are run again."""
        shutil.rmtree(self._work)

    def shard_prefix(self, shard: Shard) -> str:
        """Where the pair of a shard lies."""
        return os.path.join(self._work, f"{shard.index:06d}")

    def finished(self, shard: Shard) -> Counts | None:
        """What became of the documents of a shard, if it is finished and as it was written."""
        mark = _read(Path(self.shard_prefix(shard) + ".json"))
        if mark is None or mark.get("fingerprint") != shard.fingerprint:
            return None
        if mark.get("hashes") != self._hashes(shard):
            return None
        return Counts(**mark["counts"])

    def note(self, shard: Shard, counts: Counts) -> None:
        """Mark a shard as finished: its pair is whole and on the disk."""
        mark = {
            "fingerprint": shard.fingerprint,
            "counts": asdict(counts),
            "hashes": self._hashes(shard),
        }
        _write(self.shard_prefix(shard) + ".json", mark)

    def finish(self, about: Mapping[str, Any], counts: Counts, contents: Sequence[Content]) -> None:
        """Write the manifest, once all else is in place; then the shards are needed no more."""
        manifest = {
            **about,
            "counts": asdict(counts),
            "sizes": self._sizes(),
            _FILES: list(map(asdict, contents)),
        }
        _write(self.prefix + MANIFEST, manifest)
        shutil.rmtree(self._work)

    def _hashes(self, shard: Shard) -> dict[str, str]:
        paths = {one: self.shard_prefix(shard) + one for one in self._suffixes}
        return {one: hash_of_file(path) for one, path in paths.items() if os.path.exists(path)}

    def _sizes(self) -> dict[str, int | None]:
        paths = {suffix: self.path(suffix) for suffix in self._suffixes}
        return {one: path.stat().st_size if path.exists() else None for one, path in paths.items()}


def known_contents(folder: str | os.PathLike[str], name: str) -> Iterator[Content]:
    """Yield what files held when a source of this name was prepared, or begun, before."""
    base = os.path.join(glob.escape(os.fspath(folder)), glob.escape(name))
    for path in (*glob.glob(f"{base}-*{MANIFEST}"), *glob.glob(f"{base}-*{WORK}/{_FILES}.json")):
        for one in (_read(Path(path)) or {}).get(_FILES, ()):
            yield Content(**one)


def prepared_by_others(folder: Path, key: str, suffixes: Sequence[str]) -> Iterator[PreparedFiles]:
    """Yield what sources of other names have under a key, which says all that tokens depend on."""
    for path in sorted(glob.glob(f"{glob.escape(os.fspath(folder))}/*-{key}{MANIFEST}")):
        yield PreparedFiles(folder, Path(path).stem, suffixes)


def _read(path: Path) -> dict[str, Any] | None:
    """Return what a file holds; None if there is none, or it is damaged, or half of it."""
    try:
        found = orjson.loads(path.read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        return None
    if not isinstance(found, dict) or found.pop(_CHECK, None) != _check(found):
        return None
    return found


def _write(path: str, content: Mapping[str, Any]) -> None:
    raw = orjson.dumps({**content, _CHECK: _check(content)}, option=orjson.OPT_INDENT_2)
    write_atomically(path, raw, durable=True)


def _check(content: Mapping[str, Any]) -> str:
    return hash_of_bytes(orjson.dumps(content))
