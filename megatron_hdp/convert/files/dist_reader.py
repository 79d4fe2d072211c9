"""Reads regions of tensors from what torch.distributed.checkpoint has saved, on whatever layout."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

Numbers = Sequence[int]


class DistReader:
    """The tensors of one checkpoint.

    Args:
        folder: of its files.

    Raises:
        ValueError: it is no such checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            metadata = FileSystemReader(folder).read_metadata()
        except FileNotFoundError:
            raise ValueError(
                f"{folder}: found no .metadata, expected a checkpoint in the format torch_dist: "
                "give the folder of --save of a run that saved one"
            ) from None
        self._tensors: dict[str, TensorStorageMetadata] = {
            key: kind
            for key, kind in metadata.state_dict_metadata.items()
            if isinstance(kind, TensorStorageMetadata)
        }
        self._places: dict[MetadataIndex, Any] = metadata.storage_data

    @property
    def keys(self) -> set[str]:
        """Names of its tensors."""
        return set(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """Of a whole tensor."""
        return tuple(self._tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        """Of a tensor."""
        return self._tensors[key].properties.dtype

    def read(self, key: str, offsets: Numbers, lengths: Numbers) -> torch.Tensor:
        """A region of a tensor.

        Raises:
            ValueError: the checkpoint does not hold all of it.
        """
        found = list(self._overlaps(key, offsets, lengths))
        if len(found) == 1 and found[0][2] == tuple(lengths):  # nothing to put together
            index, inside, _, _ = found[0]
            return _narrowed(self._chunk(index), inside, lengths)
        whole = torch.empty(tuple(lengths), dtype=self.dtype(key))
        num_values = 0
        for index, inside, sizes, target in found:
            region = _narrowed(self._chunk(index), inside, sizes)
            _narrowed(whole, target, sizes).copy_(region)
            num_values += region.numel()
            del region
        if num_values != whole.numel():
            raise ValueError(
                f"{self._folder}: found {num_values:,} of {whole.numel():,} values of {key}: the "
                "checkpoint is damaged, take another one"
            )
        return whole

    def _overlaps(
        self, key: str, offsets: Numbers, lengths: Numbers
    ) -> Iterator[tuple[MetadataIndex, Numbers, Numbers, Numbers]]:
        """Chunk, the region's first index in it, its sizes, and its first index in the region."""
        for chunk in self._tensors[key].chunks:
            index, begins, sizes = MetadataIndex(key, chunk.offsets), chunk.offsets, chunk.sizes
            low = [max(one, other) for one, other in zip(begins, offsets, strict=True)]
            high = [
                min(begin + size, offset + length)
                for begin, size, offset, length in zip(begins, sizes, offsets, lengths, strict=True)
            ]
            if all(end > begin for begin, end in zip(low, high, strict=True)):
                yield (
                    index,
                    tuple(a - b for a, b in zip(low, begins, strict=True)),
                    tuple(a - b for a, b in zip(high, low, strict=True)),
                    tuple(a - b for a, b in zip(low, offsets, strict=True)),
                )

    def _chunk(self, index: MetadataIndex) -> torch.Tensor:
        place = self._places[index]
        path = self._folder / place.relative_path
        with path.open("rb") as file:
            tensor = torch.load(
                _Slice(file, place.offset, place.length), map_location="cpu", weights_only=True
            )
        return tensor.detach()


def _narrowed(tensor: torch.Tensor, begins: Numbers, lengths: Numbers) -> torch.Tensor:
    for dimension, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
        tensor = tensor.narrow(dimension, begin, length)
    return tensor


class _Slice(io.RawIOBase):
    """Some bytes of a file as a file of their own."""

    def __init__(self, file: IO[bytes], begin: int, num_bytes: int) -> None:
        super().__init__()
        self._file, self._begin, self._num_bytes = file, begin, num_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._num_bytes - self._at))
        self._file.seek(self._begin + self._at)
        done: int = self._file.readinto(view[:count])  # type: ignore[attr-defined]
        self._at += done
        return done
