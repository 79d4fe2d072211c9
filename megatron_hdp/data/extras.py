"""Packages that only some data need: imported for them, or the error names the extra to install."""

import importlib
from typing import Any


def import_extra(module: str, needed_by: str, extra: str = "data") -> Any:
    """Return a module of such a package, which an extra of megatron-hdp has.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ModuleNotFoundError(
            f"{needed_by} needs {package}, which is not installed: "
            f"pip install 'megatron-hdp[{extra}]'",
            name=package,
        ) from error
