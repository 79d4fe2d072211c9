"""The ``.sides`` beside a ``.bin/.idx`` pair: which documents were preferred, and which not.

The first page is that of `data.mapped_file` and says the kind: ``pairs``, whose documents are
chosen and rejected in turn, or ``labelled``, whose documents stand alone. Then comes one byte for
each document: 1 where it is chosen, or desirable.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

from megatron_hdp.arrays import BoolArray
from megatron_hdp.data.index_file import TokenFileError
from megatron_hdp.data.mapped_file import PAGE, DamagedFileError, FileKind
from megatron_hdp.files import new_file

SUFFIX = ".sides"
PAIRS, LABELLED = "pairs", "labelled"
KINDS = (PAIRS, LABELLED)
"""Formats of sources that have sides."""

_KIND = FileKind(b"HDPSIDES", 1)


@dataclass(frozen=True)
class Sides:
    """Of the documents of one pair."""

    kind: str
    """``pairs`` or ``labelled``."""
    is_good: BoolArray
    """Of each document: whether it is chosen, or desirable."""

    @classmethod
    def beside(cls, prefix: str | os.PathLike[str]) -> Self | None:
        """Open the sides of a pair; None: it has none.

        Raises:
            TokenFileError: they are damaged, or of documents that are no pairs.
        """
        path = os.fspath(prefix) + SUFFIX
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            about, mapped = _KIND.map(file, lambda about: PAGE + int(about["documents"]))
            kind = str(about["kind"])
        except (DamagedFileError, KeyError) as error:
            raise TokenFileError(
                f"{path} {error}: the file is damaged; make it again from its source"
            ) from None
        finally:
            os.close(file)
        found = cls(kind, np.frombuffer(mapped, np.uint8, offset=PAGE) == 1)
        if kind == PAIRS:
            found.require_turns(path)
        return found

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.is_good)

    @property
    def group(self) -> int:
        """Documents that stay together in one step."""
        return 2 if self.kind == PAIRS else 1

    def require_turns(self, path: str) -> None:
        """Refuse pairs that are not chosen and rejected in turn.

        Raises:
            TokenFileError: names the first document that is not.
        """
        expected = np.arange(len(self)) % 2 == 0
        wrong = np.flatnonzero(self.is_good != expected)
        if len(wrong) or len(self) % 2:
            place = int(wrong[0]) if len(wrong) else len(self) - 1
            raise TokenFileError(
                f"{path}: document {place} has no other side, expected chosen and rejected in "
                "turn: make the pair again from its source"
            )


def write_sides(path: str, kind: str, is_good: Iterable[bool], *, durable: bool = False) -> None:
    """Write a ``.sides``: all of it or nothing."""
    values = np.fromiter(is_good, dtype=np.uint8)
    with new_file(path, durable=durable) as temporary, open(temporary, "w+b") as target:
        target.seek(PAGE)
        target.write(values.tobytes())
        target.flush()
        target.truncate(PAGE + len(values))
        _KIND.describe(target.fileno(), {"documents": len(values), "kind": kind})


def concatenate_sides(prefixes: Iterable[str], target: str, *, durable: bool = False) -> None:
    """Write the sides of several pairs into one, in this order."""
    parts = [found for one in prefixes if (found := Sides.beside(one)) is not None]
    values = np.concatenate([one.is_good for one in parts])
    write_sides(target, parts[0].kind, values.tolist(), durable=durable)
