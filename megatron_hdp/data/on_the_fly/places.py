"""Where the records of one file begin, as a file that is made once and mapped by many processes.

The first page is that of `data.mapped_file`; then come the places and, of a table, the number of
the first record of each of its parts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.formats import Lines, Table
from megatron_hdp.data.hashes import sampled_file
from megatron_hdp.data.mapped_file import PAGE, DamagedFileError, FileKind
from megatron_hdp.data.on_the_fly.source_files import SourceFiles
from megatron_hdp.files import new_file

VERSION = 2
_KIND = FileKind(b"HDPPLACE", VERSION)
_NUM_SAMPLES = 16

Tell = Callable[[int], object]


@dataclass(frozen=True)
class _Facts:
    num_records: int
    num_places: int
    dtype: str
    """Of the places."""
    has_parts: bool

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> _Facts:
        """Read them from a file's description."""
        return cls(**about["facts"])

    @property
    def end(self) -> int:
        """Where the places end."""
        return PAGE + self.num_places * np.dtype(self.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        """Of the file that holds the places."""
        return self.end + (8 * self.num_places if self.has_parts else 0)


@dataclass(frozen=True)
class Places:
    """Of the records of a file."""

    num_records: int
    places: npt.NDArray[np.integer]
    """Byte at which each line that is not blank begins; of each part of a table its place."""
    firsts: Int64Array | None
    """Number of the first record of each part; None where every record has a place."""
    num_bytes: int
    """Of the file that holds this."""


def places_path(folder: Path, files: SourceFiles, number: int) -> Path:
    """Return where the places in a file lie: named by its size, time and samples of its content."""
    size, time = int(files.sizes[number]), int(files.times[number])
    facts = (VERSION, files.formats[number].name, size, time)
    digest = xxhash.xxh3_128(json.dumps(facts).encode())
    digest.update(sampled_file(files.paths[number], size, _NUM_SAMPLES))
    return folder / f"records-{digest.hexdigest()}.places"


def read_places(path: Path) -> Places | None:
    """Map what was written; None if it is not there, not whole or of another version."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        about, mapped = _KIND.map(file, lambda about: _Facts.of(about).num_bytes)
    except DamagedFileError:
        return None
    finally:
        os.close(file)
    facts = _Facts.of(about)
    places = np.frombuffer(mapped, facts.dtype, facts.num_places, PAGE)
    firsts = None
    if facts.has_parts:
        firsts = np.frombuffer(mapped, "<i8", facts.num_places, facts.end)
    return Places(facts.num_records, places, firsts, facts.num_bytes)


def write_places(target: Path, files: SourceFiles, number: int, tell: Tell) -> None:
    """Look for the records of a file, and keep their places: all of them or nothing.

    Raises:
        ValueError: the file is damaged, no text, or has changed.
        OSError: there is no room, for one.
    """
    path, form, size = files.paths[number], files.formats[number], int(files.sizes[number])
    dtype = "<u4" if size < 2**32 else "<u8"
    firsts: list[int] = []
    num_records = num_places = 0
    with new_file(target, durable=True) as temporary:
        with open(temporary, "w+b") as stream:
            stream.seek(PAGE)
            if isinstance(form, Lines):
                for begins in form.begins(path, tell):
                    stream.write(begins.astype(dtype).tobytes())
                    num_places += len(begins)
                num_records = num_places
            else:
                assert isinstance(form, Table), form
                for part in form.parts(path, files.key):
                    stream.write(np.array([part.place], dtype=dtype).tobytes())
                    firsts.append(num_records)
                    num_places += 1
                    num_records += part.num_rows
                stream.write(np.array(firsts, dtype="<i8").tobytes())
                tell(size)
            stream.truncate()
            facts = _Facts(num_records, num_places, dtype, isinstance(form, Table))
            _KIND.describe(stream.fileno(), {"facts": asdict(facts), "of": path[-256:]})
        files.require_unchanged(number)
