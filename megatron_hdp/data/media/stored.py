"""Pictures that are read where they are encoded: known by their places and sizes until then."""

import io
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np

from megatron_hdp.arrays import AnyArray, ByteArray
from megatron_hdp.data.formats import PartReader, Record, Table, table_of
from megatron_hdp.data.media.pictures import patches_of_picture
from megatron_hdp.data.media.settings import PictureSettings
from megatron_hdp.data.media.sizes import PictureError
from megatron_hdp.data.tokenizers import available_cpus
from megatron_hdp.media import Resizing

_LISTS = ("image", "images")
_KEPT_BYTES = 2**28
_BUFFER_BYTES = 8192
_COLOURS, _GREY = 3, 128

Decoded = ByteArray | str
"""The values of a picture's patches, or why it is damaged."""


class PictureFiles:
    """Reads the pictures of one source; several threads may ask at a time.

    Parts of tables that were read last are kept, up to 256 MiB.
    """

    def __init__(self, folder: str, settings: PictureSettings) -> None:
        """Set where names of files begin, and how pictures are resized."""
        self.folder, self.settings = folder, settings
        self._tables = PartReader(None, _KEPT_BYTES)
        self._parts: dict[str, list[tuple[int, int, int]]] = {}
        self._reading = threading.Lock()

    def raw(self, name: str, offset: int, size: int) -> bytes:
        """Return the bytes of a picture's file; arguments as of `data.media.items.ITEM`.

        Raises:
            PictureError: they are gone.
            OSError: the file cannot be read.
        """
        path = os.path.join(self.folder, name)
        if (table := table_of(path)) is not None:
            with self._reading:
                return self._of_table(path, table, offset, size)
        with open(path, "rb", buffering=0) as stream:
            found = os.pread(stream.fileno(), size, offset)
        if len(found) != size:
            raise PictureError(
                f"{path}: found {len(found):,} bytes from {offset:,} on, expected {size:,}: the "
                "file has changed since its source was prepared"
            )
        return found

    def _of_table(self, path: str, table: Table, row: int, place: int) -> bytes:
        if path not in self._parts:
            first, parts = 0, []
            for part in table.parts(path, None):
                parts.append((first, first + part.num_rows, part.place))
                first += part.num_rows
            self._parts[path] = parts
        for first, stop, at in self._parts[path]:
            if first <= row < stop:
                (found,) = self._tables.rows(path, table, at, first, [row - first])
                if isinstance(found, Record) and isinstance(found.value, dict):
                    listed = listed_pictures(found.value)
                    raw = bytes_of_picture(listed[place]) if place < len(listed) else None
                    if raw is not None:
                        return raw
        raise PictureError(
            f"{path}, row {row + 1}: found no picture {place}, expected one: the file has changed "
            "since its source was prepared"
        )


class StoredPicture:
    """A picture of a source, as an encoder takes it: decoded once its values are asked for.

    Its `grid` and the shape of its `values` follow from its size, so planning decodes nothing.
    """

    seconds: float | None = None
    """It is no video."""
    found: Decoded | None = None
    """What was decoded of it, somewhere."""

    def __init__(
        self, files: PictureFiles, name: str, offset: int, size: int, height: int, width: int
    ) -> None:
        """Name a picture by its place, and tell its size."""
        self._files, self._place = files, (name, offset, size)
        self.height, self.width = height, width
        resizing = files.settings.resizing
        self.grid = grid_of(resizing, height, width)
        self.values = _Values(self, (int(np.prod(self.grid)), _COLOURS * resizing.patch**2))

    def __repr__(self) -> str:
        """Return the same on every rank, wherever its files lie there."""
        return f"StoredPicture{(*self._place, self.height, self.width, self.grid)}"

    @property
    def pixels(self) -> AnyArray:
        """The values of its patches, uint8, read and decoded if they were not yet, and kept.

        Of one that was found to be damaged they are grey.

        Raises:
            PictureError: it is damaged, gone, or of another size than its header was.
        """
        if self.found is None:
            self.found = self._decode()
        if isinstance(self.found, str):
            return np.full(self.values.shape, _GREY, dtype=np.uint8)
        return self.found.reshape(self.values.shape)

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return int(np.prod(self.values.shape))

    def decoded(self) -> Decoded:
        """Return its values, read and decoded now, and not kept; or why they cannot be had.

        Raises:
            ValueError: the file cannot be read.
        """
        try:
            return self._decode()
        except PictureError as error:
            return str(error)
        except OSError as error:
            raise ValueError(
                f"a picture cannot be read: {error}; expected the files of a prepared source to "
                "stay"
            ) from error

    def _decode(self) -> ByteArray:
        name, settings = self._place[0], self._files.settings
        where = f"{os.path.join(self._files.folder, name)} (from {self._place[1]:,} on)"
        found = patches_of_picture(
            self._files.raw(*self._place),
            where,
            settings.resizing,
            most_pixels=settings.most_file_pixels,
        )
        if found.grid != self.grid:
            raise PictureError(
                f"{where}: found a grid of {found.grid} patches, expected {self.grid} by the "
                "header: the file has changed since its source was prepared"
            )
        return found.values


class _Values:
    """Stands for an array of known shape; becomes it when numpy asks."""

    ndim = 2

    def __init__(self, picture: StoredPicture, shape: tuple[int, int]) -> None:
        self._picture, self.shape = picture, shape

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> AnyArray:
        return np.array(self._picture.pixels, dtype=dtype, copy=copy)


def decoded(pictures: Sequence[StoredPicture]) -> list[Decoded]:
    """Return pictures, decoded in as many threads as this process may use processors.

    Raises:
        ValueError: a file cannot be read.
    """
    with ThreadPoolExecutor(max(1, available_cpus())) as pool:
        return list(pool.map(StoredPicture.decoded, pictures))


def grid_of(resizing: Resizing, height: int, width: int) -> tuple[int, int, int]:
    """Return the patches of a picture in time, height and width."""
    if resizing.square is not None:
        return 1, resizing.square // resizing.patch, resizing.square // resizing.patch
    (to_height,), (to_width,) = resizing.resized(np.array([height]), np.array([width]))
    return 1, int(to_height) // resizing.patch, int(to_width) // resizing.patch


def listed_pictures(row: dict[str, Any]) -> list[Any]:
    """Return what a row names under ``image`` and ``images``, in this order."""
    found: list[Any] = []
    for value in (row.get(key) for key in _LISTS):
        if value is not None and value != "":
            found += value if isinstance(value, list) else [value]
    return found


def bytes_of_picture(named: Any) -> bytes | None:
    """Return the bytes that a table has of a picture; None where it has its path."""
    raw = named.get("bytes") if isinstance(named, dict) else named
    return raw if isinstance(raw, bytes) else None


@contextmanager
def section(path: str, offset: int, size: int) -> Iterator[BinaryIO]:
    """Open some bytes of a file as if they were one."""
    with open(path, "rb", buffering=0) as file:
        yield io.BufferedReader(_Section(file.fileno(), offset, size), _BUFFER_BYTES)


class _Section(io.RawIOBase):
    def __init__(self, file: int, offset: int, size: int) -> None:
        super().__init__()
        self._file, self._offset, self._size, self._at = file, offset, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"found the place {base + offset}, expected one from 0 on")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._at))
        raw = os.pread(self._file, count, self._offset + self._at)
        buffer[: len(raw)] = raw
        self._at += len(raw)
        return len(raw)
