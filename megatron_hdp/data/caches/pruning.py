"""Caches that nobody has opened for long are removed; what a process uses or makes is not touched.

A cache is removed under two locks: that of whoever makes it, so that it is not made meanwhile, and
that of its main file, which every process holds that has opened it (`data.cache_use`). Whoever
comes in that moment waits for the one or the other, finds nothing, and makes it again.
"""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megatron_hdp.data.cache_use import StoredCache, alone
from megatron_hdp.data.prepare import stored_sources
from megatron_hdp.data.tables import stored_tables


class Fate(StrEnum):
    """What becomes of a cache."""

    REMOVED = "removed"
    RECENT = "opened recently"
    IN_USE = "in use"
    BEING_MADE = "being made"
    REFUSED = "refused"
    """By the system: a cache of another user, say."""


@dataclass(frozen=True)
class FoundCache:
    """A cache, and what becomes of it."""

    name: str
    """What its files are called up to their suffixes."""
    num_bytes: int
    """Of all its files."""
    idle_s: float
    """Since it was opened, or made."""
    fate: Fate
    reason: str = ""
    """What the system said where it refused."""


def prune(folder: Path, *, older_than_s: float, dry_run: bool = False) -> Iterator[FoundCache]:
    """Remove the caches of a folder that nobody uses or makes and that were not opened for long.

    Args:
        folder: of caches; those below it are not looked at.
        older_than_s: how long not, in seconds.
        dry_run: remove nothing, and tell what would be.

    Yields:
        Every cache with its fate, once that is settled.

    Raises:
        ValueError: there is no such folder.
        OSError: the folder cannot be read.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: found no folder, expected one of caches: the --data-cache-path of a run, "
            "or hdp-cache beside its data"
        )
    for cache in (*stored_tables(folder), *stored_sources(folder)):
        num_bytes, idle_s = _size(cache), _idle_s(cache)
        try:
            fate, reason = _settled(cache, older_than_s, dry_run), ""
        except OSError as error:
            fate, reason = Fate.REFUSED, error.strerror or str(error)
        yield FoundCache(cache.name, num_bytes, idle_s, fate, reason)


def _settled(cache: StoredCache, older_than_s: float, dry_run: bool) -> Fate:
    if _idle_s(cache) < older_than_s:
        return Fate.RECENT
    if dry_run and not cache.lock.exists():
        return _settled_here(cache, older_than_s, dry_run)
    with alone(cache.lock, make=not dry_run) as nobody_makes_it:
        if not nobody_makes_it:
            return Fate.BEING_MADE
        return _settled_here(cache, older_than_s, dry_run)


def _settled_here(cache: StoredCache, older_than_s: float, dry_run: bool) -> Fate:
    """Settle it while nobody can make it."""
    if not cache.main.exists():
        return _removed(cache, dry_run)
    with alone(cache.main) as nobody_uses_it:
        if not nobody_uses_it:
            return Fate.IN_USE
        if _idle_s(cache) < older_than_s:  # opened since, and left
            return Fate.RECENT
        return _removed(cache, dry_run)


def _removed(cache: StoredCache, dry_run: bool) -> Fate:
    """Remove it; what is left where that is interrupted is found again by its lock."""
    if not dry_run:
        for path in (*cache.parts, cache.main, cache.lock):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    return Fate.REMOVED


def _idle_s(cache: StoredCache) -> float:
    """Return how long ago it was opened or changed.

    The time of access counts of the main file alone: others are read to look for a cache.
    """
    changed = [status.st_mtime for status in _statuses((cache.main, *cache.parts))]
    opened = [status.st_atime for status in _statuses((cache.main,))]
    only_lock = [status.st_mtime for status in _statuses((cache.lock,))]
    return time.time() - max([*changed, *opened] or only_lock, default=0.0)


def _size(cache: StoredCache) -> int:
    return sum(status.st_size for status in _statuses((cache.main, cache.lock, *cache.parts)))


def _statuses(paths: tuple[Path, ...]) -> Iterator[os.stat_result]:
    """Yield the status of each file, of a folder that of each file in it."""
    for path in paths:
        below = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
        for one in below if path.is_dir() else [path]:
            with suppress(FileNotFoundError):  # whoever makes the cache may rename and remove
                yield one.stat()
