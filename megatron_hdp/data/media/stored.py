"""Items that are read where they are encoded: known by their places and sizes until then."""

import io
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple
from functools import cached_property
from typing import Any, BinaryIO, ClassVar

import numpy as np

from megatron_hdp.arrays import AnyArray, ByteArray
from megatron_hdp.data.formats import PartReader, Record, Table, table_of
from megatron_hdp.data.media.items import BETWEEN, INLINE, ItemSize
from megatron_hdp.data.media.pictures import patches_of_picture, resized, upright_picture
from megatron_hdp.data.media.settings import (
    MediaSettings,
    PictureSettings,
    SoundSettings,
    VideoSettings,
)
from megatron_hdp.data.media.sizes import MediaError
from megatron_hdp.data.media.sounds import samples_of
from megatron_hdp.data.media.spectrograms import BINS, HOP, spectrogram_of
from megatron_hdp.data.media.videos import (
    KeptVideos,
    frames_of_video,
    patches_of_frames,
    size_of_video,
)
from megatron_hdp.data.tokenizers import available_cpus
from megatron_hdp.media import Resizing, Windows

_KEPT_BYTES = 2**28
_BUFFER_BYTES = 8192
_COLOURS = 3

Decoded = ByteArray | str
"""The bytes of an item's values, or why it is damaged."""


class MediaFiles:
    """Reads the items of one source; several threads may ask at a time.

    Parts of tables that were read last are kept, up to 256 MiB, and as much of videos.

    Attributes:
        videos: that were decoded last.
    """

    def __init__(self, folder: str, settings: MediaSettings, inline: str | None = None) -> None:
        """Set where names of files begin, how they are read, and the file of `items.INLINE`."""
        self.folder, self.settings, self._inline = folder, settings, inline
        self._tables = PartReader(None, _KEPT_BYTES)
        self._parts: dict[str, list[tuple[int, int, int]]] = {}
        self._reading = threading.Lock()
        self.videos = KeptVideos(_KEPT_BYTES)

    def path(self, name: str) -> str:
        """Return the path of a name."""
        if name == INLINE and self._inline is not None:
            return self._inline
        return os.path.join(self.folder, name)

    def whole(self, name: str) -> bytes:
        """Return the bytes of a file.

        Raises:
            OSError: the file cannot be read.
        """
        with open(self.path(name), "rb") as stream:
            return stream.read()

    def raw(self, name: str, offset: int, size: int) -> bytes:
        """Return the bytes of an item's file; arguments as of `data.media.items.ITEM`.

        Raises:
            MediaError: they are gone.
            OSError: the file cannot be read.
        """
        path = self.path(name)
        if (table := table_of(path)) is not None:
            with self._reading:
                return self._of_table(path, table, offset, size)
        with open(path, "rb", buffering=0) as stream:
            found = os.pread(stream.fileno(), size, offset)
        if len(found) != size:
            raise MediaError(_has_changed(path, len(found), offset, size))
        return found

    @contextmanager
    def stream(self, name: str, offset: int, size: int) -> Iterator[BinaryIO]:
        """Open an item's file, of a table its bytes; as `raw`, but not read as a whole."""
        path = self.path(name)
        if table_of(path) is not None:
            yield io.BytesIO(self.raw(name, offset, size))
        elif (found := os.path.getsize(path) - offset) < size:
            raise MediaError(_has_changed(path, max(found, 0), offset, size))
        else:
            with section(path, offset, size) as stream:
                yield stream

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
                    listed = listed_items(found.value, self.settings.lists)
                    raw = bytes_of_item(listed[place]) if place < len(listed) else None
                    if raw is not None:
                        return raw
        raise MediaError(
            f"{path}, row {row + 1}: found no {self.settings.noun} {place}, expected one: the file "
            "has changed since its source was prepared"
        )


def _has_changed(path: str, found: int, offset: int, expected: int) -> str:
    return (
        f"{path}: found {found:,} bytes from {offset:,} on, expected {expected:,}: the file has "
        "changed since its source was prepared"
    )


class StoredItem(ABC):
    """An item of a source, as an encoder takes it: read once its values are asked for.

    The shape of its `values` follows from its size, so planning decodes nothing.
    """

    dtype: ClassVar[type[np.generic]]
    """Of its values."""
    damaged: ClassVar[float]
    """What the values of a damaged one are."""
    found: Decoded | None = None
    """What was decoded of it, somewhere."""

    def __init__(self, files: MediaFiles, place: tuple[str, int, int], size: ItemSize) -> None:
        """Name an item by its place, as of `data.media.items.ITEM`, and tell its size."""
        self._files, self._place, self._size = files, place, size
        self.height, self.width = size.height, size.width

    def __repr__(self) -> str:
        """Return the same on every rank, wherever its files lie there."""
        about = (*self._place, *astuple(self._size), self.shape)
        return f"{type(self).__name__}{about}"

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Of its values."""

    @property
    @abstractmethod
    def num_patches(self) -> int:
        """What its encoder counts of it."""

    @abstractmethod
    def _read(self, where: str) -> AnyArray:
        """Return its values from its file, which an error calls by `where`.

        Raises:
            MediaError: it is damaged, gone, or of another size than its header was.
        """

    @cached_property
    def values(self) -> Any:
        """What an encoder is given: an array to numpy, as soon as numpy asks for its numbers."""
        return _Values(self, self.shape)

    @property
    def array(self) -> AnyArray:
        """Its values, read and decoded if they were not yet, and kept; of a damaged one `damaged`.

        Raises:
            MediaError: it is damaged, gone, or of another size than its header was.
        """
        if self.found is None:
            self.found = self._decode()
        if isinstance(self.found, str):
            return np.full(self.shape, self.damaged, dtype=self.dtype)
        return self.found.view(self.dtype).reshape(self.shape)

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    def decoded(self) -> Decoded:
        """Return the bytes of its values, read and decoded now, and not kept; or what is wrong.

        Raises:
            ValueError: the file cannot be read.
        """
        try:
            return self._decode()
        except MediaError as error:
            return str(error)
        except OSError as error:
            raise ValueError(
                f"a {self._files.settings.noun} cannot be read: {error}; expected the files of a "
                "prepared source to stay"
            ) from error

    def _decode(self) -> ByteArray:
        where = f"{self._files.path(self._place[0])} (from {self._place[1]:,} on)"
        found = self._read(where)
        return found.reshape(-1).view(np.uint8)


class StoredPicture(StoredItem):
    """A picture, as `media.Patches`."""

    dtype, damaged = np.uint8, 128  # grey
    seconds: float | None = None
    """It is no video."""

    @cached_property
    def grid(self) -> tuple[int, int, int]:
        """Patches in time, height and width."""
        return grid_of(self._settings.resizing, self.height, self.width)

    @property
    def num_patches(self) -> int:
        """All of its grid."""
        return int(np.prod(self.grid))

    @property
    def shape(self) -> tuple[int, int]:
        """Patches, and values of each."""
        return self.num_patches, _COLOURS * self._settings.resizing.patch**2

    @property
    def _settings(self) -> PictureSettings:
        assert isinstance(self._files.settings, PictureSettings), "a source of pictures"
        return self._files.settings

    def _read(self, where: str) -> AnyArray:
        settings, raw = self._settings, self._files.raw(*self._place)
        found = patches_of_picture(
            raw, where, settings.resizing, most_pixels=settings.most_file_pixels
        )
        if found.grid != self.grid:
            raise MediaError(
                f"{where}: found a grid of {found.grid} patches, expected {self.grid} by the "
                "header: the file has changed since its source was prepared"
            )
        return found.values


class StoredFrames(StoredItem):
    """A temporal patch of a video, as `media.Patches`."""

    dtype, damaged = np.uint8, 128  # grey

    @property
    def seconds(self) -> float:
        """Between its video's temporal patches."""
        return self._size.seconds

    @property
    def first(self) -> int:
        """Temporal patches of its video before it."""
        return self._size.part

    @cached_property
    def grid(self) -> tuple[int, int, int]:
        """Patches in time, height and width."""
        return grid_of(self._settings.resizing, self.height, self.width, self._size.frames)

    @property
    def num_patches(self) -> int:
        """All of its grid."""
        return int(np.prod(self.grid))

    @property
    def shape(self) -> tuple[int, int]:
        """Patches, and values of each."""
        values = _COLOURS * self._settings.resizing.patch**2
        return self.num_patches, values * len(self._frames)

    @property
    def _frames(self) -> range:
        """Its frames, among those of its video that are seen."""
        each, first = self._settings.resizing.frames_per_patch, self._size.part
        return range(each * first, min(each * (first + 1), self._size.frames))

    @property
    def _settings(self) -> VideoSettings:
        assert isinstance(self._files.settings, VideoSettings), "a source of videos"
        return self._files.settings

    def _read(self, where: str) -> AnyArray:
        name, where = self._place[0], where.replace(BETWEEN, " ").rstrip()
        if name.endswith(BETWEEN):
            frames = [self._listed(one) for one in name.split(BETWEEN)[:-1]]
        else:
            video = self._files.videos.of(self._place, lambda: self._video(where))
            frames = [video[number] for number in self._frames]
        return patches_of_frames(frames, self._settings.resizing)

    def _listed(self, name: str) -> AnyArray:
        where, most = self._files.path(name), self._settings.most_file_pixels
        return self._resized(upright_picture(self._files.whole(name), where, most), where)

    def _video(self, where: str) -> list[AnyArray]:
        settings, most = self._settings, self._settings.most_file_pixels
        with self._files.stream(*self._place) as stream:
            size = size_of_video(stream, where, most_pixels=most)
            seen = settings.sampling.chosen(size, where)
            if len(seen) != self._size.frames:
                raise MediaError(
                    f"{where}: found {size.num_frames:,} frames of which {len(seen):,} would be "
                    f"seen, expected {self._size.frames:,}: the file is damaged, or has changed "
                    "since its source was prepared"
                )
            frames = frames_of_video(stream, where, seen, most_pixels=most)
            return [self._resized(one, where) for one in frames]

    def _resized(self, frame: Any, where: str) -> AnyArray:
        if frame.size != (self.width, self.height):
            raise MediaError(
                f"{where}: found a frame of {frame.height:,} x {frame.width:,} pixels, expected "
                f"{self.height:,} x {self.width:,} by the header: the file is damaged, or has "
                "changed since its source was prepared"
            )
        return resized(frame, self._settings.resizing, self._size.frames)


class StoredSound(StoredItem):
    """A window of sound, as `media.Sound`."""

    dtype, damaged = np.float32, -1.5  # silence

    @property
    def num_frames(self) -> int:
        """Those that hold sound."""
        return self.width

    @property
    def num_patches(self) -> int:
        """States that become rows."""
        return self._windows.patches(self.height, self.width)[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Bins, and frames that its rows depend on."""
        return BINS, self._windows.seen(self.width)

    @property
    def _windows(self) -> Windows:
        assert isinstance(self._files.settings, SoundSettings), "a source of sounds"
        return self._files.settings.windows

    def _read(self, where: str) -> AnyArray:
        most = self._windows.most_frames
        samples = samples_of(self._files.raw(*self._place), where, most * HOP)
        if -(-len(samples) // HOP) != self.num_frames:
            raise MediaError(
                f"{where}: found {len(samples):,} samples, expected {self.num_frames:,} frames of "
                f"{HOP} by the header: the file is damaged, or has changed since its source was "
                "prepared"
            )
        return spectrogram_of(samples, self.shape[1], most)


def stored_item(files: MediaFiles, place: tuple[str, int, int], size: ItemSize) -> StoredItem:
    """Return an item of a source, of its kind; its place as of `data.media.items.ITEM`."""
    return _KINDS[type(files.settings)](files, place, size)


_KINDS: dict[type[MediaSettings], type[StoredItem]] = {
    PictureSettings: StoredPicture,
    SoundSettings: StoredSound,
    VideoSettings: StoredFrames,
}


class _Values:
    """Stands for an array of known shape; becomes it when numpy asks."""

    ndim = 2

    def __init__(self, item: StoredItem, shape: tuple[int, int]) -> None:
        self._item, self.shape = item, shape

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> AnyArray:
        return np.array(self._item.array, dtype=dtype, copy=copy)


def decoded(items: Sequence[StoredItem]) -> list[Decoded]:
    """Return items, decoded in as many threads as this process may use processors.

    Raises:
        ValueError: a file cannot be read.
    """
    with ThreadPoolExecutor(max(1, available_cpus())) as pool:
        return list(pool.map(StoredItem.decoded, items))


def grid_of(
    resizing: Resizing, height: int, width: int, num_frames: int = 1
) -> tuple[int, int, int]:
    """Return the patches of a picture, or of a temporal patch, in time, height and width."""
    if resizing.square is not None:
        return 1, resizing.square // resizing.patch, resizing.square // resizing.patch
    sides = np.array([height]), np.array([width])
    (to_height,), (to_width,) = resizing.resized(*sides, num_frames)
    return 1, int(to_height) // resizing.patch, int(to_width) // resizing.patch


def listed_items(row: dict[str, Any], lists: Sequence[str]) -> list[Any]:
    """Return what a row names under some keys, such as ``image`` and ``images``, in this order."""
    found: list[Any] = []
    for value in (row.get(key) for key in lists):
        if value is not None and value != "":
            found += value if isinstance(value, list) else [value]
    return found


def bytes_of_item(named: Any) -> bytes | None:
    """Return the bytes that a table has of an item; None where it has its path."""
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
