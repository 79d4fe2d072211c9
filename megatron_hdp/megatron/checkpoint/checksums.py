"""Checksums of a checkpoint's files, written with it: what is damaged later is found.

    iter_0000010/checksums.json     size and XXH3 of every other file of the checkpoint

A file is summed right after it is written, by the process that wrote it, so all ranks do it side by
side and with ``--async-save`` beside training. The part of a rank waits in the checkpoint's folder
until the first rank puts all of them together.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

SUMS = "checksums.json"
_ALGORITHM = "xxh3_128"
_BLOCK_BYTES = 1 << 20  # stays in a core's cache between reading and summing


@dataclass(frozen=True)
class FileSum:
    """What a file holds, in short."""

    num_bytes: int
    xxh3: str

    @classmethod
    def of_file(cls, path: Path) -> FileSum:
        """Reads the whole file."""
        digest, block, num_bytes = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK_BYTES)), 0
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                digest.update(block[:count])
                num_bytes += count
        return cls(num_bytes, digest.hexdigest())


def write_and_sum(
    write: Callable[..., None], folder: Path, rank: int, *args: Any, **kwargs: Any
) -> None:
    """Lets Megatron write a rank's files, and leaves their checksums for `take_part`.

    A function of the module, because Megatron may hand it to a process that it spawns. `write`
    keeps its errors for the rank that waits for it; names of files begin with the rank.
    """
    write(*args, **kwargs)
    try:
        part = {path.name: FileSum.of_file(path) for path in sorted(folder.glob(f"__{rank}_*"))}
        _part(folder, rank).write_text(_as_json(part))
    except OSError as error:
        # Nobody sees this process's errors; `merge` sees a file without a checksum.
        print(f"rank {rank}: no checksums of its files in {folder}: {error}", flush=True)


def take_part(folder: Path, rank: int) -> dict[str, FileSum]:
    """Takes what `write_and_sum` has left of this rank, nothing if the rank wrote nothing."""
    part = _part(folder, rank)
    if not part.exists():
        return {}
    sums = _from_json(part)
    part.unlink()
    return sums


def merge(folder: Path, parts: Iterable[dict[str, FileSum]]) -> None:
    """Writes `SUMS` for a checkpoint whose files are all there; those of no rank are summed here.

    Raises:
        ValueError: a file of tensors was not summed by the rank that wrote it.
    """
    sums = {name: sum for part in parts for name, sum in part.items()}
    for path in folder.iterdir():
        if path.suffix == ".distcp" and path.name not in sums:
            raise ValueError(
                f"{path}: found no checksum, expected one of the process that wrote it, which was "
                "killed or could not read it (its log says why): start again, or add "
                "--no-checkpoint-checksums"
            )
        if path.name not in sums:
            sums[path.name] = FileSum.of_file(path)
    (folder / SUMS).write_text(_as_json(sums))


def read_sums(folder: Path) -> dict[str, FileSum] | None:
    """The checksums of a checkpoint's files by name; None if it was saved without.

    Raises:
        ValueError: the file that holds them is damaged.
    """
    return _from_json(folder / SUMS) if (folder / SUMS).exists() else None


def fingerprint_of(folder: Path) -> str:
    """What tells the tensors of a checkpoint from those of others, 32 hexadecimal digits.

    Files that were saved without checksums are read for it.
    """
    sums = read_sums(folder) or {}
    digest = xxhash.xxh3_128()
    for path in sorted(folder.glob("*.distcp")):
        found = sums.get(path.name) or FileSum.of_file(path)
        digest.update(f"{path.name} {found.num_bytes} {found.xxh3}\n".encode())
    return digest.hexdigest()


class Inventory(ABC):
    """What is known of a checkpoint's files without reading all of them."""

    has_checksums: bool
    lists: tuple[str, ...]
    """Names of the small files that say what the others are."""

    def __init__(self, folder: Path, sizes: dict[str, int]) -> None:
        self._folder = folder
        self.sizes = sizes  # bytes of each file whose content can be checked

    def outer_faults(self) -> list[str]:
        """What names, sizes and small files show: which are missing, or not what was saved."""
        faults = []
        for name, num_bytes in self.sizes.items():
            path = self._folder / name
            if not path.is_file():
                faults.append(f"{path}: found no such file, expected {num_bytes:,} bytes")
            elif (found := path.stat().st_size) != num_bytes:
                faults.append(f"{path}: found {found:,} bytes, expected {num_bytes:,}")
        return faults

    def added_files(self) -> list[str]:
        """Names of files that were not saved with the checkpoint; they harm nothing."""
        names = {path.name for path in self._folder.iterdir()}
        return sorted(names - {*self.lists, *self.sizes})

    @abstractmethod
    def fault_of(self, name: str) -> str | None:
        """What is wrong with the content of a file, which is read whole; None if nothing is."""


def _part(folder: Path, rank: int) -> Path:
    return folder / f"sums-{rank}"


def _as_json(sums: dict[str, FileSum]) -> str:
    files = {name: asdict(sums[name]) for name in sorted(sums)}
    return json.dumps({"algorithm": _ALGORITHM, "files": files}, indent=1)


def _from_json(path: Path) -> dict[str, FileSum]:
    try:
        content = json.loads(path.read_bytes())
        if content["algorithm"] != _ALGORITHM:
            raise ValueError(f"algorithm {content['algorithm']!r}")
        return {
            name: FileSum(int(entry["num_bytes"]), str(entry["xxh3"]))
            for name, entry in content["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: found no list of checksums ({error}), expected JSON with algorithm "
            f"{_ALGORITHM} and files"
        ) from None
