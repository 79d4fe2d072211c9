"""What a checkpoint without checksums tells of its own soundness: its lists, sizes and CRCs.

Torch saves each tensor as a ZIP archive, whose CRC-32 nobody compares when it is loaded.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_hdp.megatron.checkpoint.checksums import Inventory
from megatron_hdp.megatron.checkpoint.named_classes import METADATA, ForeignClass
from megatron_hdp.megatron.checkpoint.unpickling import read_list

_COMMON, _CONFIG = "common.pt", "metadata.json"
_COMMON_KEY = "common_state"
"""Under which newer releases, such as 0.19, hold among the tensors what was ``common.pt``."""


class Structure(Inventory):
    """A checkpoint of which only Megatron's own files tell something."""

    has_checksums, lists = False, (METADATA, _COMMON, _CONFIG)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, {})
        self._parts: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._keys: set[str] = set()
        of_metadata = self._read_metadata()
        found = (self._read_config(), self._read_common(), of_metadata)
        self._faults = [fault for fault in found if fault]
        self.sizes = {
            name: max(offset + length for offset, length in parts)
            for name, parts in self._parts.items()
        }

    def outer_faults(self) -> list[str]:
        """Lists that cannot be read, and files of tensors that are missing or too short."""
        return [*self._faults, *super().outer_faults()]

    def fault_of(self, name: str) -> str | None:
        """Whether every tensor of the file is a whole archive."""
        path = self._folder / name
        try:
            with path.open("rb") as file:
                for offset, length in self._parts[name]:
                    file.seek(offset)
                    if fault := _fault_of_archive(file.read(length)):
                        return f"{path}: {fault} at byte {offset:,}"
        except OSError as error:
            return f"{path}: found {error.strerror}, expected a file of tensors"
        return None

    def _read_config(self) -> str | None:
        path = self._folder / _CONFIG
        try:
            content = json.loads(path.read_bytes())
            known = isinstance(content, dict) and content.get("sharded_backend") == "torch_dist"
            found = str(content)[:60]
        except (ValueError, OSError, RecursionError) as error:
            known, found = False, _words(error)
        expected = 'JSON with "sharded_backend": "torch_dist"'
        return None if known else f"{path}: found {found}, expected {expected}"

    def _read_common(self) -> str | None:
        path = self._folder / _COMMON
        if not path.exists() and any(key.split("/")[0] == _COMMON_KEY for key in self._keys):
            return None
        try:
            data = path.read_bytes()
        except OSError as error:
            return f"{path}: found {_words(error)}, expected what all ranks hold alike"
        fault = _fault_of_archive(data)
        return f"{path}: {fault}" if fault else None

    def _read_metadata(self) -> str | None:
        """Notes which parts of which files hold tensors; a fault if that cannot be told."""
        path = self._folder / METADATA
        try:
            metadata = read_list(self._folder)
            for info in metadata.storage_data.values():
                name, offset, length = str(info.relative_path), int(info.offset), int(info.length)
                if Path(name).name != name or offset < 0 or length <= 0:
                    raise ValueError(f"{length} bytes at {offset} of {name[:60]!r}")
                self._parts[name].append((offset, length))
            for key, tensor in metadata.state_dict_metadata.items():
                _require_covered(key, tensor)
            self._keys = {str(key) for key in metadata.state_dict_metadata}
        except ForeignClass as error:
            return str(error)
        # a damaged pickle may raise anything, and what it gave may be of any shape
        except Exception as error:
            self._parts.clear()
            return f"{path}: found {_words(error)}, expected the list of the checkpoint's tensors"
        return None


def _require_covered(key: Any, tensor: Any) -> None:
    """Refuses a list whose pieces of a tensor are not the whole tensor, once.

    Raises:
        ValueError: they are not.
    """
    if not isinstance(tensor, TensorStorageMetadata):
        return
    numbers = 0
    for chunk in tensor.chunks:
        ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > size for end, size in zip(ends, tensor.size, strict=True)):
            raise ValueError(f"a piece of {key} that lies outside of it")
        numbers += chunk.sizes.numel()
    if numbers != tensor.size.numel():
        raise ValueError(f"{numbers:,} numbers of {key} instead of {tensor.size.numel():,}")


def _fault_of_archive(data: bytes) -> str | None:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            damaged = archive.testzip()
    # garbage makes zipfile raise errors of many kinds, its own among them
    except Exception as error:
        return f"found {_words(error)}, expected an archive of torch.save"
    return (
        f"found another CRC-32 of {damaged}, expected the one that was saved" if damaged else None
    )


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__} ({' '.join(str(error).split())[:120]})"
