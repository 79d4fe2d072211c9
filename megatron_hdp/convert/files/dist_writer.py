"""Writes tensors as torch.distributed.checkpoint does, one at a time, in any number of sittings.

    __3_0.distcp    tensors, each as torch.save writes it, one behind the other
    .metadata       shape and dtype of every tensor, its chunks, and where each of them lies

torch's own writer keeps the tensors of a file until it is closed.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """A region of a tensor that lies in a file."""

    keys: tuple[str, ...]
    """Names of the tensor; each is found under all of them."""
    shape: Numbers
    """Of the whole tensor."""
    offsets: Numbers
    lengths: Numbers
    dtype: torch.dtype
    begin: int
    """Of its bytes in the file."""
    num_bytes: int


class _Stream(io.BufferedWriter):
    """Remembers what the disk says: torch's writer turns it into words about positions."""

    refused: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.refused = error
            raise


class DistFile:
    """One file of tensors."""

    def __init__(self, path: Path) -> None:
        self._file = _Stream(io.FileIO(path, "w"))
        self.chunks: list[Chunk] = []

    def write(
        self,
        keys: tuple[str, ...],
        shape: Numbers,
        offsets: Numbers,
        lengths: Numbers,
        tensor: torch.Tensor,
    ) -> None:
        """Writes a region of the tensor `keys`; `tensor` holds nothing else.

        Raises:
            OSError: the disk is full, for one.
        """
        begin = self._file.tell()
        try:
            torch.save(tensor.reshape(lengths), self._file)
        except RuntimeError:
            if self._file.refused is None:
                raise
            raise self._file.refused from None
        num_bytes = self._file.tell() - begin
        self.chunks.append(Chunk(keys, shape, offsets, lengths, tensor.dtype, begin, num_bytes))

    def write_nothing(self, keys: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Writes what Megatron saves of a module without a state of its own; returns its place."""
        stream = io.BytesIO()
        torch.save([None], stream)
        begin = self._file.tell()
        self._file.write(stream.getvalue())
        return dict.fromkeys(keys, (begin, self._file.tell() - begin))

    def close(self) -> None:
        """Forces the file to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def write_metadata(
    folder: Path,
    files: Sequence[tuple[str, Sequence[Chunk]]],
    empty: tuple[str, dict[str, tuple[int, int]]],
) -> None:
    """Writes what says where everything lies; with it the folder is a checkpoint.

    Args:
        folder: of the files.
        files: their names, and the chunks of each.
        empty: a file, and the places of states without content in it, by key.

    Raises:
        ValueError: regions of one tensor differ in dtype.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    results = []
    for name, chunks in files:
        for chunk in chunks:
            for key in chunk.keys:
                index = _add(tensors, key, chunk)
                place = _StorageInfo(relative_path=name, offset=chunk.begin, length=chunk.num_bytes)
                results.append(WriteResult(index, chunk.num_bytes, place))
    name, states = empty
    for key, (begin, num_bytes) in states.items():
        place = _StorageInfo(relative_path=name, offset=begin, length=num_bytes)
        results.append(WriteResult(MetadataIndex(key), num_bytes, place))
    kinds = {**tensors, **{key: BytesStorageMetadata() for key in states}}
    FileSystemWriter(folder).finish(Metadata(kinds), [results])


def _add(tensors: dict[str, TensorStorageMetadata], key: str, chunk: Chunk) -> MetadataIndex:
    known = tensors.setdefault(
        key, TensorStorageMetadata(TensorProperties(chunk.dtype), torch.Size(chunk.shape), [])
    )
    if known.properties.dtype != chunk.dtype:
        raise ValueError(
            f"{key}: found layers in {chunk.dtype} and in {known.properties.dtype}, expected one "
            "type in all of them: save the model in one type with transformers"
        )
    known.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.lengths)))
    return MetadataIndex(key, torch.Size(chunk.offsets), len(known.chunks) - 1)


def as_record(chunk: Chunk) -> dict[str, Any]:
    """What `from_record` takes, of numbers and texts."""
    return {**asdict(chunk), "dtype": str(chunk.dtype).removeprefix("torch.")}


def from_record(record: Mapping[str, Any]) -> Chunk:
    """The chunk that `as_record` described."""
    numbers = {name: tuple(record[name]) for name in ("keys", "shape", "offsets", "lengths")}
    return Chunk(**{**record, **numbers, "dtype": getattr(torch, record["dtype"])})
