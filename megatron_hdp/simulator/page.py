"""Pages of plans and reports: one HTML file each, which needs no network.

``page.html`` is the template, ``page.css`` its style, ``page.js`` draws charts and bars.
"""

import base64
import os
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
import orjson

from megatron_hdp.arrays import AnyArray
from megatron_hdp.files import new_file
from megatron_hdp.simulator.palette import IDLE, Palette, pale

KINDS = {np.dtype(np.int32): "i", np.dtype(np.float64): "d", np.dtype(np.uint8): "b"}
_HOW = (
    "Ctrl and the wheel zoom in time, with Shift in ranks; drag to move, double-click to see all, "
    "click a degree to hide it; arrow keys go from bar to bar."
)


def write_page(
    path: str | os.PathLike[str], title: str, body: str, document: Mapping[str, Any]
) -> None:
    """Write a page.

    Args:
        path: the file; written under another name and renamed when it is complete.
        title: of the window.
        body: HTML; elements in it have the ids that `document` names.
        document: under ``charts`` lists of charts by id, under ``bars`` what is drawn in ``bars``.
    """
    data = orjson.dumps(document).decode().replace("<", "\\u003c")  # nothing closes the script
    parts = {
        "__TITLE__": escape(title),
        "__STYLE__": _text_of("page.css"),
        "__BODY__": body,
        "__DATA__": data,
        "__CODE__": _text_of("page.js"),
    }
    # what is filled in is not looked at again
    pieces = re.split(f"({'|'.join(parts)})", _text_of("page.html"))
    with new_file(path, durable=False) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.writelines(parts.get(piece, piece) for piece in pieces)


def bars_on_page(
    gantts: Sequence[Mapping[str, Any]],
    palette: Palette,
    window_s: float,
    *,
    note: str,
    legend: Sequence[tuple[str, str]],
    **more: Any,
) -> dict[str, Any]:
    """What ``drawBars`` of page.js takes: pictures on one axis of time, of so many seconds.

    The legend's names and colours stand behind those of the degrees.
    """
    degrees = zip(palette.names, palette.colours, strict=True)
    return {
        "gantts": gantts,
        "window": window_s,
        "note": f"{note} {_HOW}",
        "legend": [*((*one, i) for i, one in enumerate(degrees)), *legend],
        "mostOfGroup": [most for _, most in palette.groups],
        "colours": palette.colours,
        "pale": [pale(colour) for colour in palette.colours],
        **more,
    }


def encoded(arrays: Mapping[str, AnyArray]) -> dict[str, tuple[str, str]]:
    """What ``arrays`` of page.js reads.

    Of each array its kind (i: int32, d: float64, b: uint8) and its little-endian bytes as text.
    """
    found = {}
    for name, array in arrays.items():
        kind = {"f": np.float64, "b": np.uint8, "u": np.uint8}.get(array.dtype.kind, np.int32)
        raw = array.astype(np.dtype(kind).newbyteorder("<")).tobytes()
        found[name] = KINDS[np.dtype(kind)], base64.b64encode(raw).decode()
    return found


WAITING = ("waiting", f"var(--idle, {IDLE})")
"""Of a legend."""


def _text_of(name: str) -> str:
    return files("megatron_hdp.simulator").joinpath(name).read_text("utf-8")
