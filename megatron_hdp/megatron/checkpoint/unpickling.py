"""Unpickles what lies in a checkpoint as data: whoever can write a folder runs no code here.

torch pickles the list of tensors (`.metadata`) and the objects among them, and unpickles both
without asking what they call. Here the list may name the few classes that torch and Megatron put
there, an object what ``torch.load(weights_only=True)`` takes, Megatron's classes included.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from megatron_hdp.megatron.checkpoint.named_classes import (
    METADATA,
    ForeignClass,
    is_getattr,
    require_known,
)

_NAMED_BY_TORCH = re.compile(r"GLOBAL (\S+)")


class _DataUnpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._where = Path(file.name)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if is_getattr(module, name):
            return self._member
        require_known(self._where, module, name)
        return super().find_class(module, name)

    def _member(self, kind: Any, name: Any) -> Any:
        is_enumeration = isinstance(kind, type) and issubclass(kind, Enum)
        if not is_enumeration or name not in kind.__members__:
            raise ForeignClass(self._where, f"builtins.getattr of {name!r}")
        return kind[name]


def load_list(file: BinaryIO) -> Any:
    """Unpickles an open `.metadata`.

    Raises:
        ForeignClass: it names something else than a list of tensors does.
        Exception: of any kind; it is damaged.
    """
    return _DataUnpickler(file).load()


def read_list(folder: Path) -> Metadata:
    """The list of a checkpoint's tensors; raises as `load_list` does, or an OSError."""
    with (folder / METADATA).open("rb") as file:
        found: Metadata = load_list(file)
        return found


@contextmanager
def as_data() -> Iterator[None]:
    """Within the block, torch and Megatron read lists and objects of checkpoints as data alone."""
    load_bytes = DefaultLoadPlanner.load_bytes
    filesystem.pickle = SimpleNamespace(**{**vars(pickle), "load": load_list})

    def load_checked_bytes(self: Any, read_item: Any, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        load_bytes(self, read_item, value)

    DefaultLoadPlanner.load_bytes = load_checked_bytes
    try:
        yield
    finally:
        DefaultLoadPlanner.load_bytes = load_bytes
        filesystem.pickle = pickle


def foreign_class(error: BaseException, source: Path) -> ForeignClass | None:
    """What a checkpoint asked for, if that is why it could not be read."""
    if isinstance(error, ForeignClass):
        return error
    refused = isinstance(error, pickle.UnpicklingError) and _NAMED_BY_TORCH.search(str(error))
    return ForeignClass(source, refused[1]) if refused else None
