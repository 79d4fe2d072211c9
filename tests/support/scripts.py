"""Scripts as modules."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@contextmanager
def script_module(name: str) -> Iterator[ModuleType]:
    """A script by its path below ``scripts``; what stands beside it can be imported meanwhile."""
    path = SCRIPTS / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)  # as Python does for a script
        patch.setitem(sys.modules, spec.name, module)  # its dataclasses look themselves up
        spec.loader.exec_module(module)
        yield module
