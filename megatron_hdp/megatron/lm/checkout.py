"""Which Megatron-LM a run finds: that of the current folder before any on Python's path.

A run's script is in its checkout, and a script's folder comes first on Python's path. A command
such as ``megatron-hdp`` has its own folder there and must look for itself.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Checkout:
    """A Megatron-LM that was found."""

    folder: str
    """The one that has ``megatron/training``."""
    release: str
    is_current: bool
    """Whether it is the current folder; else it is on Python's path."""


@contextmanager
def current_folder_first() -> Iterator[None]:
    """Within the block Python finds the checkout of the current folder, if that is one."""
    folder = Path.cwd()
    if not (folder / "megatron" / "training").is_dir():
        yield
        return
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def find() -> Checkout | None:
    """The Megatron-LM that Python finds now; None if there is no ``megatron.training``."""
    spec = importlib.util.find_spec("megatron.training")
    if spec is None or not spec.submodule_search_locations:
        return None
    from megatron_hdp.megatron.lm.releases import installed_version

    folder = Path(next(iter(spec.submodule_search_locations))).resolve().parents[1]
    return Checkout(str(folder), installed_version(), folder == Path.cwd().resolve())
