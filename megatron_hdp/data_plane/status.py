"""What a node's part of the data plane is doing, in a file that anybody of its user may read."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

_FILE = "status.json"


def write_status(folder: Path, found: Mapping[str, Any]) -> None:
    """Replace a node's status."""
    unnamed = folder / f"{_FILE}.new"
    with os.fdopen(os.open(unnamed, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.truncate()
        file.write(orjson.dumps({**found, "time": time.time()}))
    unnamed.replace(folder / _FILE)


def read_status(folder: Path) -> dict[str, Any] | None:
    """Return a node's status; None where there is none yet."""
    try:
        found: dict[str, Any] = orjson.loads((folder / _FILE).read_bytes())
    except FileNotFoundError:
        return None
    return found
