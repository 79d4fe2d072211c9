"""What reading gives: records, those that are none, the pieces of files that both come from."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file that can be read by itself."""

    path: str
    format: str
    """The name of the file's format."""
    begin: int
    """First byte of lines, first row group or batch of tables; else 0."""
    end: int
    """One past the last."""
    num_bytes: int
    """What it takes of the file: pieces of a file add up to its size."""


class Origin:
    """Where the records of a piece lie, in a reader's words."""

    def __init__(self, path: str, unit: str, before: Callable[[], int] | None = None) -> None:
        """Name the records of a piece.

        Args:
            path: the file.
            unit: what is counted in it, ``line`` or ``row``.
            before: how many of them lie before the piece; called once, when first asked for, as
                it may read the file from its start. None: the piece begins the file.
        """
        self.path = path
        self._unit = unit
        self._before = before
        self._num_before = 0

    def where(self, number: int) -> str:
        """Name the record at a number, which counts from 1 in the piece; 0 is the file itself."""
        if number == 0:
            return self.path
        return f"{self.path}, {self._unit} {self.in_file(number)}"

    def in_file(self, number: int) -> int:
        """Return the number of a record in its file, from 1, of its number in the piece."""
        if self._before is not None:
            self._num_before, self._before = self._before(), None
        return self._num_before + number


@dataclass(frozen=True, slots=True)
class Record:
    """One document of a file."""

    value: bytes | str | dict[str, Any]
    """Its text (bytes: UTF-8 as it lies on disk), or a whole row where rows are asked for."""
    num_bytes: int
    """Bytes of the file that were read for it: a sum over all records of a piece says how far it
    is; what is compressed is counted so."""
    origin: Origin
    number: int

    @property
    def where(self) -> str:
        """File and line or row, as messages name them."""
        return self.origin.where(self.number)


@dataclass(frozen=True, slots=True)
class BadRecord:
    """What stands in a document's place and is none."""

    message: str
    """File, line or row, found, expected."""
    num_bytes: int
    """As a record's."""


def text_record(raw: bytes, num_bytes: int, origin: Origin, number: int) -> Record | BadRecord:
    """Return the document of a text as it lies on disk, which is bad if it is no UTF-8."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        message = (
            f"{origin.where(number)}: found no UTF-8 (byte {error.start:,} is "
            f"0x{raw[error.start]:02x}), expected text: convert it, or leave it out"
        )
        return BadRecord(message, num_bytes)
    return Record(raw, num_bytes, origin, number)


class Format(ABC):
    """How a file holds records, and what reads them."""

    name: str
    """For messages, and in the keys of what is prepared: never changed."""
    suffixes: tuple[str, ...] = ()
    """Of the files, in lower case."""

    def pieces(self, path: str, size: int, piece_bytes: int) -> list[Piece]:
        """Cut a file of ``size`` bytes into pieces that can be read apart, in order."""
        return [Piece(path, self.name, 0, size, size)]

    @abstractmethod
    def read(self, piece: Piece, key: str | None) -> Iterator[Record | BadRecord]:
        """Yield the records of a piece in order.

        Args:
            piece: a part of a file.
            key: of the text; None: the value is the whole row.

        Raises:
            ValueError: the file as a whole is something else, or damaged.
            ModuleNotFoundError: it needs pyarrow, which is not installed.
        """
