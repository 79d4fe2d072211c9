"""A file of safetensors, read and written tensor by tensor; no file is in memory as a whole.

    8 bytes     length of the header, little-endian
    header      JSON: dtype, shape and place in the data of each tensor
    data        the tensors' bytes, one behind the other

The library ``safetensors`` writes a file from all of its tensors at once, which is too much memory
for a shard of several gigabytes; and what it reads is counted to the process's memory by the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # the library's own limit
_ALIGNMENT = 8  # of the data, as the library writes it

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FLOATING = ("F64", "F32", "F16", "BF16")
"""Whose numbers mean themselves."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""The same the other way round."""


class Readable(Protocol):
    """A tensor that lies somewhere."""

    @property
    def dtype(self) -> str:
        """The format's name of it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""

    @property
    def num_bytes(self) -> int:
        """Likewise."""

    def read(self) -> torch.Tensor:
        """Return it."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies."""

    path: Path
    dtype: str
    """The format's name of it."""
    shape: tuple[int, ...]
    begin: int
    """Of its bytes in the file."""
    num_bytes: int

    def read(self, part: int | None = None) -> torch.Tensor:
        """Reads the tensor, or one entry of its first dimension.

        Raises:
            ValueError: the file is shorter than it was.
        """
        shape = self.shape if part is None else self.shape[1:]
        num_bytes = self.num_bytes if part is None else self.num_bytes // self.shape[0]
        begin = self.begin + (part or 0) * num_bytes
        tensor = torch.empty(shape, dtype=DTYPES[self.dtype])
        target = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
        with self.path.open("rb", buffering=0) as file:
            file.seek(begin)
            done = 0
            while done < num_bytes:
                count = file.readinto(target[done:])
                if not count:
                    raise ValueError(
                        f"{self.path}: found its end at byte {begin + done:,}, expected "
                        f"{begin + num_bytes:,}: it became shorter meanwhile, fetch it again"
                    )
                done += count
        return tensor


def read_header(path: Path) -> dict[str, Stored]:
    """Where the tensors of a file lie, by name; reads none of them.

    Raises:
        ValueError: it is no such file, or not all of it is there.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(_MOST_HEADER_BYTES, size - _LENGTH_BYTES):
            raise _damaged(path, f"a header of {length:,} bytes in a file of {size:,}")
        text = file.read(length)
    try:
        header = json.loads(text)
        stored = {
            name: _stored(path, entry, _LENGTH_BYTES + length)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"no header ({error})") from None
    end = max((one.begin + one.num_bytes for one in stored.values()), default=size)
    if size != end:
        raise _damaged(path, f"{size:,} bytes where its header speaks of {end:,}")
    return stored


def _stored(path: Path, entry: Mapping[str, Any], data: int) -> Stored:
    dtype, shape = entry["dtype"], tuple(map(int, entry["shape"]))
    begin, end = map(int, entry["data_offsets"])
    if dtype not in DTYPES:
        raise ValueError(f"values of type {dtype}")
    if begin < 0 or end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{end - begin:,} bytes for {dtype} of shape {list(shape)}")
    return Stored(path, dtype, shape, data + begin, end - begin)


def _damaged(path: Path, found: str) -> ValueError:
    return ValueError(
        f"{path}: found {found}, expected a whole file of safetensors: fetch it again"
    )


class SafetensorsWriter:
    """Writes a file whose tensors are known before, each when it comes, in any order.

    Its whole size is taken from the disk at once, so that a full one is met before any work. The
    tensors, with dtype and shape of each, are in the order of the file.

    Raises:
        OSError: the disk is full, for one.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    ) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._begins, end = {}, 0
        for name, (dtype, shape) in tensors.items():
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            self._begins[name] = begin
            offsets = [begin, end]
            header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._data = _LENGTH_BYTES + len(text)
        self._file = path.open("wb", buffering=0)
        try:
            os.posix_fallocate(self._file.fileno(), 0, self._data + max(end, 1))
            self._file.truncate(self._data + end)
            self._write(len(text).to_bytes(_LENGTH_BYTES, "little") + text, 0)
        except OSError:
            self._file.close()
            raise

    def write(self, name: str, tensor: torch.Tensor, part: int | None = None) -> None:
        """Writes a tensor, or one entry of its first dimension."""
        begin = self._data + self._begins[name]
        if part is not None:
            begin += part * tensor.numel() * tensor.dtype.itemsize
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        self._write(memoryview(flat.numpy()), begin)

    def close(self) -> None:
        """Forces the file to the disk."""
        os.fsync(self._file.fileno())
        self._file.close()

    def _write(self, data: bytes | memoryview, begin: int) -> None:
        rest = memoryview(data)
        while rest:
            count = os.pwrite(self._file.fileno(), rest, begin)
            rest, begin = rest[count:], begin + count
