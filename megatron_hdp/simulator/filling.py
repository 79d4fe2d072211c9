"""A page is a template whose places are filled: one HTML file that needs no network."""

import base64
import os
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import numpy as np
import orjson

from megatron_hdp.arrays import AnyArray
from megatron_hdp.files import write_atomically

_NUMBERS = "__NUMBERS__"


def write_filled(path: str | os.PathLike[str], template: str, places: Mapping[str, str]) -> None:
    """Write a page.

    Args:
        path: the file; written under another name and renamed when it is complete.
        template: HTML; ``__NUMBERS__`` in it stands for what all pages share.
        places: what stands for each of the others, each of which is there once.
    """
    places = {_NUMBERS: text_of("megatron_hdp.simulator", "numbers.js"), **places}
    pattern = "|".join(map(re.escape, places))
    parts = re.split(f"({pattern})", template)  # what is filled in is not looked at again
    assert sorted(parts[1::2]) == sorted(places), parts[1::2]
    parts[1::2] = [places[place] for place in parts[1::2]]
    write_atomically(path, "".join(parts).encode(), durable=False)


def text_of(package: str, name: str) -> str:
    """The text of a file that lies beside a package's modules."""
    return files(package).joinpath(name).read_text("utf-8")


def script_data(document: Any) -> str:
    """JSON that can stand in a script: a name in it cannot close the script."""
    return orjson.dumps(document).decode().replace("<", "\\u003c")


def encoded(array: AnyArray) -> tuple[str, str]:
    """What ``arrays`` of numbers.js reads.

    The kind of an array (i: int32, d: float64, b: uint8) and its little-endian bytes as text.
    """
    kind = {np.dtype(np.int32): "i", np.dtype(np.float64): "d", np.dtype(np.uint8): "b"}
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return kind[array.dtype], base64.b64encode(little.tobytes()).decode()
