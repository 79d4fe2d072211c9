"""The tables of sequences in a folder of caches, by the names of their files."""

import re
from pathlib import Path

from megatron_hdp.data.cache_use import StoredCache

TABLE, LOCK, TIMES = ".table", ".lock", ".times"
"""The suffixes of a table's files; what is under way has a process's number behind one."""

_NAME = re.compile(r"(sequences-[0-9a-f]{32})(?:\.lock|\.(?:table|times)(?:\.tmp\d+)?)")


def table_name(key: str) -> str:
    """Return what the files of a table are called, up to their suffixes."""
    return f"sequences-{key}"


def stored_tables(folder: Path) -> list[StoredCache]:
    """Return the tables in a folder, also those that were never finished, by name."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if match := _NAME.fullmatch(path.name):
            found.setdefault(match[1], []).append(path)
    return [_stored(folder / name, paths) for name, paths in found.items()]


def _stored(base: Path, paths: list[Path]) -> StoredCache:
    main, lock = Path(f"{base}{TABLE}"), Path(f"{base}{LOCK}")
    parts = tuple(path for path in paths if path not in (main, lock))
    return StoredCache(base.name, main, lock, parts)
