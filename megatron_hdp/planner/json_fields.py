"""Fields of a dataclass from a file of JSON."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import orjson

from megatron_hdp.nearest import nearest


def read_fields(cls: type, path: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """The JSON object of a file, whose keys are fields of a dataclass.

    Raises:
        ValueError: not such an object; gives the nearest name of an unknown key.
    """
    try:
        data = orjson.loads(Path(path).read_bytes())
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{what} {path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{what} {path}: found {type(data).__name__}; expected an object")
    names = [field.name for field in dataclasses.fields(cls)]
    for key in data:
        if key not in names:
            near = nearest(key, names)
            raise ValueError(f"{what} {path}: unknown key {key!r}; nearest is {near!r}")
    return data
