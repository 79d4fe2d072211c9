"""Reads regions of tensors from what torch.distributed.checkpoint has saved, on whatever layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

Numbers = Sequence[int]


class DistReader:
    """The tensors of one checkpoint, a folder, by its list of them."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self._folder = folder
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

    @property
    def files(self) -> set[str]:
        """Names of the files that hold them, the optimizer's aside."""
        kept = (index for index in self._places if index.fqn in self._tensors)
        return {
            str(self._places[index].relative_path) for index in kept if "optimizer" not in index.fqn
        }

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
            return narrow_tensor_by_index(self._chunk(index), inside, lengths)
        whole = torch.empty(tuple(lengths), dtype=self.dtype(key))
        num_values = 0
        for index, inside, sizes, target in found:
            region = narrow_tensor_by_index(self._chunk(index), inside, sizes)
            narrow_tensor_by_index(whole, target, sizes).copy_(region)
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
        name = str(place.relative_path)
        if Path(name).name != name:
            raise ValueError(
                f"{self._folder}: found {index.fqn} in {name!r}, expected a file of this folder: "
                "take another checkpoint"
            )
        path = self._folder / name
        with path.open("rb") as file:
            view = _create_file_view(file, place.offset, place.length)
            tensor: torch.Tensor = torch.load(view, map_location="cpu", weights_only=True)
        return tensor.detach()
