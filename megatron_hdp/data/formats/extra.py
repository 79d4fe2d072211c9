"""pyarrow, which only some files need: imported for them, or it is said how to install it."""

import importlib
from typing import Any


def pyarrow_module(path: str, name: str = "pyarrow") -> Any:
    """Return pyarrow, or a module of it, to read a file with.

    Raises:
        ModuleNotFoundError: it is not installed; names the extra.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise ModuleNotFoundError(
            f"{path} needs pyarrow to be read, which is not installed: "
            "pip install 'megatron-hdp[data]'",
            name="pyarrow",
        ) from error
