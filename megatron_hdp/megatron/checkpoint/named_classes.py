"""What the list of a checkpoint's tensors may name: a few classes of torch and Megatron.

It is a pickle, and whoever unpickles it runs what it names. Here it is looked at without torch,
and nothing that it names is made.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

METADATA = ".metadata"
_TORCHS = "torch.distributed.checkpoint"
_KNOWN = {
    f"{_TORCHS}.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    },
    f"{_TORCHS}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    f"{_TORCHS}.planner": {  # Megatron adds who has written what
        *("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    },
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},  # by its name
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},  # Python 3.13
}
_ENUMERATIONS = ("WriteItemType", "_MEM_FORMAT_ENCODING")
_DTYPE = re.compile(r"bool|bfloat16|(float|u?int|complex)\d\w*")


class ForeignClass(ValueError):
    """A file of a checkpoint asks for something that may run code."""

    def __init__(self, where: Path, name: str) -> None:
        super().__init__(
            f"{where}: found {name}, which may run code, expected data alone, as torch and "
            "Megatron write it: load no checkpoint of somebody whom you do not trust"
        )


def require_known(where: Path, module: str, name: str) -> None:
    """Refuses what no list of tensors names.

    Raises:
        ForeignClass: naming it.
    """
    if module == "torch" and _DTYPE.fullmatch(name):
        return
    if name not in _KNOWN.get(module, ()):
        raise ForeignClass(where, f"{module}.{name}")


def is_getattr(module: str, name: str) -> bool:
    """Whether it is by what Python 3.11.0 to 3.11.3 writes a member of an enumeration.

    It takes the class and the member's name: whoever lets a list name it must look at both.
    """
    return module in ("builtins", "__builtin__") and name == "getattr"


class _Anything(dict[Any, Any]):
    """Takes the place of whatever a list names: made of anything, it keeps nothing."""

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __setstate__(self, _: Any) -> None:
        pass

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


class _Enumeration(_Anything):
    """In the place of one of those."""


class _Look(pickle.Unpickler):
    def __init__(self, path: Path, file: Any) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if is_getattr(module, name):
            return self._member
        require_known(self._path, module, name)
        return _Enumeration if name in _ENUMERATIONS else _Anything

    def _member(self, kind: Any, name: Any) -> _Anything:
        if kind is not _Enumeration:
            raise ForeignClass(self._path, f"builtins.getattr of {name!r}")
        return _Anything()


def fault_of_list(folder: Path) -> str | None:
    """Why a checkpoint's list of tensors cannot be read as data; None if it can, or is missing."""
    path = folder / METADATA
    if not path.exists():
        return None
    try:
        with path.open("rb") as file:
            _Look(path, file).load()
    except ForeignClass as error:
        return str(error)
    except Exception as error:  # of any kind, by what is damaged
        return f"{path}: found {type(error).__name__}: {error}, expected a list of tensors"
    return None
