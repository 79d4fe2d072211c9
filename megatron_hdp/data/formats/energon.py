"""The tars of a data set that Energon has prepared: those that it gives to training.

Its folder ``.nv-meta`` names them by split. Its indices beside the tars are not needed: headers of
tars are read once, when a source is prepared.
"""

import os
import re
from collections.abc import Iterator
from typing import Any

import yaml

META, _TRAIN = ".nv-meta", "train"
_SPLITS = ("split.yaml", "split.json")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def energon_shards(folder: str) -> list[str] | None:
    """Return the tars of the split ``train``, in its order; None if the folder is none of Energon.

    Raises:
        ValueError: the splits cannot be read, leave out samples, or name a tar that is not there.
    """
    meta = os.path.join(folder, META)
    if not os.path.isdir(meta):
        return None
    paths = [path for name in _SPLITS if os.path.isfile(path := os.path.join(meta, name))]
    if not paths:
        raise ValueError(
            f"{meta}: found neither {' nor '.join(_SPLITS)}, expected one: prepare the data set "
            "with energon prepare, or give a glob: '*.tar'"
        )
    names, left_out = _read(paths[0])
    found = []
    for name in (one for pattern in names for one in _expanded(pattern)):
        if name in left_out:
            continue
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            raise ValueError(f"{path}: no such file, expected what {paths[0]} names: copy it again")
        found.append(path)
    if not found:
        raise ValueError(f"{paths[0]}: found no tar of the split {_TRAIN}, expected one or more")
    return found


def _read(path: str) -> tuple[list[str], set[str]]:
    """Patterns of the split's tars, and tars that are left out."""
    try:
        with open(path, encoding="utf-8") as file:
            said: Any = yaml.safe_load(file)
        names, left_out = said["split_parts"][_TRAIN], said.get("exclude") or []
        if not all(isinstance(one, str) for one in (*names, *left_out)):
            raise TypeError("a name is no text")
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: found no tars of a split {_TRAIN} ({error}), expected split_parts as energon "
            "prepare writes them"
        ) from error
    samples = [one for one in left_out if not one.endswith(".tar")]
    if samples:
        raise ValueError(
            f"{path}: found samples that are left out ({samples[0]}), expected whole tars: write "
            "tars without them"
        )
    return list(names), {name for pattern in left_out for name in _expanded(pattern)}


def _expanded(pattern: str) -> Iterator[str]:
    """The names that a pattern with ranges in braces stands for."""
    if (found := _RANGE.search(pattern)) is None:
        yield pattern
        return
    first, last = found.groups()
    for number in range(int(first), int(last) + 1):
        name = f"{pattern[: found.start()]}{number:0{len(first)}d}{pattern[found.end() :]}"
        yield from _expanded(name)
