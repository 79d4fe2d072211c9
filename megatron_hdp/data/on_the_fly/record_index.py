"""How many records a source has, and any of them by its number."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.formats import (
    BadRecord,
    PartReader,
    Piece,
    Record,
    Table,
    Text,
    line_origin,
    read,
    record_of_line,
)
from megatron_hdp.data.on_the_fly.places import Places, places_path, read_places, write_places
from megatron_hdp.data.on_the_fly.source_files import SourceFiles
from megatron_hdp.data.prepare import progress_bar
from megatron_hdp.data.tokenizers import available_cpus
from megatron_hdp.files import Say, locked

_PART_BYTES = 2**28
_DAY_S = 86_400.0
_MOST_THREADS = 4


class RecordIndex:
    """The records of files, in order: lines that are not blank, rows of tables, files of text.

    Places lie in files of a folder, which processes of a node make once and map. What is read at a
    time is a line, a file, or a part of a table; thread-unsafe.
    """

    def __init__(self, files: SourceFiles, places: list[Places | None]) -> None:
        """Take the places in each file, None of one that is a record; see `open`."""
        self.files = files
        self._places = places
        counts = [1 if one is None else one.num_records for one in places]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._parts = PartReader(files.key, _PART_BYTES)

    @classmethod
    def open(cls, name: str, files: SourceFiles, folder: Path, say: Say) -> Self:
        """Map the places of a source's records; what is missing is looked for, once a node.

        Raises:
            ValueError: a file is damaged or no text.
            OSError: the folder cannot be written, there is no room, for one.
        """
        targets = {
            number: places_path(folder, files, number)
            for number, form in enumerate(files.formats)
            if not isinstance(form, Text)  # a record as a whole
        }
        found = {number: read_places(path) for number, path in targets.items()}
        missing = [number for number, one in found.items() if one is None]
        if missing:
            os.makedirs(folder, exist_ok=True)
            lock = next(iter(targets.values())).with_suffix(".lock")
            with locked(lock, f"source {name}", say, patience_s=_DAY_S):
                missing = [number for number in missing if read_places(targets[number]) is None]
                _make(name, files, {number: targets[number] for number in missing}, say)
            found |= {n: _written(targets[n]) for n, one in found.items() if one is None}
        return cls(files, [found.get(number) for number in range(len(files))])

    def __len__(self) -> int:
        """Return the number of records."""
        return int(self._ends[-1])

    @property
    def num_bytes(self) -> int:
        """Bytes of the files that hold the places."""
        return sum(one.num_bytes for one in self._places if one is not None)

    def read(self, rows: Int64Array) -> Iterator[tuple[int, Record | BadRecord]]:
        """Yield records of rising numbers with these, in the order in which they lie.

        Raises:
            ChangedFileError: a file is not what it was.
            ValueError: a file is damaged.
        """
        numbers = np.searchsorted(self._ends, rows, side="right")
        for number in np.unique(numbers).tolist():
            here = rows[numbers == number]
            places = self._places[number]
            first = int(self._ends[number]) - (1 if places is None else places.num_records)
            self.files.require_unchanged(number)
            if places is None:
                records = self._text(number)
            elif places.firsts is None:
                records = self._lines(number, places, here - first)
            else:
                records = self._rows(number, places.places, places.firsts, here - first)
            yield from zip(here.tolist(), records, strict=True)

    def where(self, row: int) -> str:
        """Name the place of a record, as messages do."""
        number = int(np.searchsorted(self._ends, row, side="right"))
        path, places = self.files.paths[number], self._places[number]
        if places is None:
            return path
        within = row - int(self._ends[number]) + places.num_records
        if places.firsts is None:
            return line_origin(path, int(places.places[within])).where(1)
        return f"{path}, row {within + 1}"

    def _text(self, number: int) -> Iterator[Record | BadRecord]:
        size = int(self.files.sizes[number])
        piece = Piece(self.files.paths[number], "text", 0, size, size)
        found = list(read(piece, self.files.key))
        self.files.require_unchanged(number)
        yield from found

    def _lines(
        self, number: int, places: Places, within: Int64Array
    ) -> Iterator[Record | BadRecord]:
        path = self.files.paths[number]
        begins = places.places[within].astype(np.int64)
        following = np.minimum(within + 1, places.num_records - 1)
        ends = places.places[following].astype(np.int64)
        ends[within + 1 == places.num_records] = self.files.sizes[number]
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                raw = _bytes_of(file, begin, end - begin)
                line = raw[: raw.find(b"\n") + 1] or raw  # blank lines may follow
                record = record_of_line(
                    line, len(line), line_origin(path, begin), 1, self.files.key
                )
                if isinstance(record, BadRecord):  # perhaps because the file was written over
                    self.files.require_unchanged(number)
                yield record
        finally:
            os.close(file)
        self.files.require_unchanged(number)

    def _rows(
        self, number: int, places: npt.NDArray[np.integer], firsts: Int64Array, within: Int64Array
    ) -> Iterator[Record | BadRecord]:
        path, table = self.files.paths[number], self.files.formats[number]
        assert isinstance(table, Table), table
        parts = np.searchsorted(firsts, within, side="right") - 1
        for part in np.unique(parts).tolist():
            first = int(firsts[part])
            numbers = (within[parts == part] - first).tolist()
            found = list(self._parts.rows(path, table, int(places[part]), first, numbers))
            self.files.require_unchanged(number)
            yield from found


def _make(name: str, files: SourceFiles, targets: dict[int, Path], say: Say) -> None:
    total = sum(int(files.sizes[number]) for number in targets)
    if not targets:
        return
    say(f"source {name}: finding the records of {len(targets):,} files, {total:,} bytes")
    with (
        progress_bar(f"{name}: records", total, delay_s=1.0) as tell,
        ThreadPoolExecutor(min(_MOST_THREADS, available_cpus())) as pool,
    ):
        made = [pool.submit(write_places, path, files, i, tell) for i, path in targets.items()]
        for one in made:
            one.result()


def _written(path: Path) -> Places:
    found = read_places(path)
    if found is None:
        raise OSError(
            f"{path} was written and cannot be read, expected what was written: look whether the "
            "disk is sound, or name another folder with --data-cache-path"
        )
    return found


def _bytes_of(file: int, begin: int, count: int) -> bytes:
    """Read bytes of a file, fewer where it ends."""
    parts = []
    while count and (part := os.pread(file, count, begin)):
        parts.append(part)
        begin, count = begin + len(part), count - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
