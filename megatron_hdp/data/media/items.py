"""The ``.items`` beside a ``.bin/.idx`` pair: the items of each document, and where they lie.

The first page is that of `data.mapped_file`. Then come ``first[documents + 1]``, the items before
each document (``int64``); 32 bytes an item (`ITEM`); where the name of each file ends (``int64``);
the names, one behind another, which begin at the folder of the source's pictures. A temporal patch
of a video is an item; where the video is a list of files, those of its frames are its name, with
`BETWEEN` between them. Items whose bytes stood in their rows lie one behind another in a file
beside the pair, ``.media``, whose name here is `INLINE`.
"""

import io
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.index_file import TokenFileError
from megatron_hdp.data.mapped_file import PAGE, DamagedFileError, FileKind
from megatron_hdp.files import new_file

SUFFIX, INLINE_SUFFIX = ".items", ".media"
INLINE = ""
"""The name of what lies in the pair's own file."""
ITEM = np.dtype(
    [
        ("offset", "<u8"),  # of its first byte; in a table the number of its row
        ("size", "<u4"),  # in bytes; in a table its number among the pictures of its row
        ("file", "<u4"),
        ("token", "<u4"),  # of the document, which stands for it
        ("height", "<u2"),  # in pixels, upright
        ("width", "<u2"),
        ("frames", "<u2"),  # that are seen of its video; 1 of what is none
        ("part", "<u2"),  # which of its video's temporal patches it is
        ("seconds", "<f4"),  # between those
    ]
)
BETWEEN = "\0"
"""Names of the files of one item."""
MOST_SIDE, MOST_BYTES = 2**16 - 1, 2**32 - 1

_KIND = FileKind(b"HDPITEMS", 2)
_NUMBER = np.dtype("<i8")
_REBUILD = "make it again from its source"


@dataclass(frozen=True)
class ItemSize:
    """How large an item is; as of `ITEM`."""

    height: int
    width: int
    frames: int = 1
    part: int = 0
    seconds: float = 0.0
    shown_at_s: float = 0.0
    """When it is shown in its video; not stored, but written into the text."""


@dataclass(frozen=True)
class ItemPlace:
    """An item of a document, and where its bytes lie."""

    file: str
    """From the folder of the source's pictures on."""
    offset: int
    """As of `ITEM`."""
    size: int
    of: ItemSize
    raw: bytes | None = field(default=None, repr=False)
    """Its bytes, where they stood in its row; its file is `INLINE` then."""


@dataclass(frozen=True)
class Items:
    """Of the documents of one pair; mapped, so that the processes of a node share them."""

    first: Int64Array
    """Items before each document, and all, ``[documents + 1]``."""
    records: npt.NDArray[Any]
    """Of type `ITEM`, document after document, by their tokens."""
    samples: str
    """A digest of the file, or of samples of a large one."""
    _ends: Int64Array
    _names: memoryview

    @classmethod
    def beside(cls, prefix: str | os.PathLike[str]) -> Self | None:
        """Open the items of a pair; None: it has none.

        Raises:
            TokenFileError: they are damaged.
        """
        path = os.fspath(prefix) + SUFFIX
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            about, mapped = _KIND.map(file, lambda about: _places(about)[-1])
            places = _places(about)
        except DamagedFileError as error:
            raise TokenFileError(f"{path} {error}: the file is damaged; {_REBUILD}") from None
        finally:
            os.close(file)
        counts = int(about["documents"]) + 1, int(about["items"]), int(about["files"])
        first = np.frombuffer(mapped, _NUMBER, counts[0], places[0])
        records = np.frombuffer(mapped, ITEM, counts[1], places[1])
        ends = np.frombuffer(mapped, _NUMBER, counts[2], places[2])
        samples = str(about["samples"])
        found = cls(first, records, samples, ends, memoryview(mapped)[places[3] :])
        found._require(path)
        return found

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.first) - 1

    def of(self, document: int) -> npt.NDArray[Any]:
        """Return the items of a document, of type `ITEM`."""
        return self.records[self.first[document] : self.first[document + 1]]

    def name(self, file: int) -> str:
        """Return the name of a file, from the folder of pictures on."""
        begin = int(self._ends[file - 1]) if file else 0
        return bytes(self._names[begin : int(self._ends[file])]).decode()

    def _require(self, path: str) -> None:
        counts = np.diff(self.first)
        files = self.records["file"]
        if (
            self.first[0] != 0
            or self.first[-1] != len(self.records)
            or (counts < 0).any()
            or (len(files) and int(files.max()) >= len(self._ends))
            or not all(self.records[name].all() for name in ("height", "width", "frames"))
        ):
            raise TokenFileError(f"{path} contradicts itself: the file is damaged; {_REBUILD}")


class InlineWriter:
    """Writes bytes of items beside a pair, all or nothing; no file where there are none."""

    def __init__(self, prefix: str, *, durable: bool = False) -> None:
        """Write beside this pair."""
        self._path, self._durable = prefix + INLINE_SUFFIX, durable
        self._stack = ExitStack()
        self._target: BinaryIO | None = None
        self.size = 0

    def __enter__(self) -> Self:
        """Remove what an older pair had."""
        with suppress(FileNotFoundError):
            os.remove(self._path)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the file in its place, unless something went wrong."""
        self._stack.__exit__(kind, error, trace)

    def add(self, raw: bytes) -> int:
        """Append an item's bytes; return where they begin."""
        begin = self.size
        self.size += self._opened().write(raw)
        return begin

    def add_all_of(self, prefix: str) -> int:
        """Append what lies beside a pair; return where it begins."""
        begin = self.size
        with suppress(FileNotFoundError), open(prefix + INLINE_SUFFIX, "rb") as source:
            shutil.copyfileobj(source, self._opened())
            self.size += source.tell()
        return begin

    def _opened(self) -> BinaryIO:
        if self._target is None:
            name = self._stack.enter_context(new_file(self._path, durable=self._durable))
            self._target = self._stack.enter_context(io.BufferedWriter(io.FileIO(name, "w")))
        return self._target


class ItemsWriter:
    """Collects the items of documents, and writes them: all of it or nothing."""

    def __init__(self, inline: InlineWriter) -> None:
        """Begin without a document; `inline` takes what stood in rows."""
        self._inline = inline
        self._counts: list[int] = []
        self._parts: list[npt.NDArray[Any]] = []
        self._numbers: dict[str, int] = {}

    def add(self, items: Sequence[ItemPlace], tokens: Sequence[int]) -> None:
        """Append the next document, whose items stand at some of its tokens."""
        part = np.zeros(len(items), dtype=ITEM)
        raw, offset = None, 0
        for i, (one, token) in enumerate(zip(items, tokens, strict=True)):
            file = self._number(one.file)
            if one.raw is None:
                offset = one.offset
            elif one.raw is not raw:  # parts of a video share its bytes
                offset = self._inline.add(one.raw)
            raw = one.raw
            sides = one.of.height, one.of.width
            of_video = one.of.frames, one.of.part, one.of.seconds
            part[i] = (offset, one.size, file, token, *sides, *of_video)
        self._counts.append(len(items))
        self._parts.append(part)

    def add_all_of(self, other: Items, prefix: str) -> None:
        """Append every document of a pair, whose items these are."""
        names = [other.name(file) for file in range(len(other._ends))]
        renamed, part = [self._number(name) for name in names], other.records.copy()
        is_inline = np.array([*(name == INLINE for name in names), False])[part["file"]]
        part["offset"][is_inline] += np.uint64(self._inline.add_all_of(prefix))
        part["file"] = np.array([*renamed, 0], dtype=np.uint32)[part["file"]]
        self._counts += np.diff(other.first).tolist()
        self._parts.append(part)

    def write(self, path: str, *, durable: bool = False) -> None:
        """Write a ``.items``."""
        first = np.concatenate([[0], np.cumsum(self._counts, dtype=np.int64)]).astype(_NUMBER)
        records = np.concatenate([np.zeros(0, dtype=ITEM), *self._parts])
        names = [name.encode() for name in self._numbers]
        ends = np.cumsum([len(name) for name in names], dtype=np.int64).astype(_NUMBER)
        about = {
            "documents": len(self._counts),
            "items": len(records),
            "files": len(names),
            "names": sum(map(len, names)),
        }
        with new_file(path, durable=durable) as temporary, open(temporary, "w+b") as target:
            target.seek(PAGE)
            for part in (first, records, ends):
                target.write(part.tobytes())
            target.write(b"".join(names))
            target.flush()
            target.truncate(_places(about)[-1])
            _KIND.describe(target.fileno(), about)

    def _number(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))


def concatenate_items(prefixes: Iterable[str], target: str, *, durable: bool = False) -> None:
    """Write the items of several pairs beside one, in this order."""
    with InlineWriter(target, durable=durable) as inline:
        writer = ItemsWriter(inline)
        for prefix in prefixes:
            if (found := Items.beside(prefix)) is not None:
                writer.add_all_of(found, prefix)
    writer.write(target + SUFFIX, durable=durable)


def _places(about: Any) -> list[int]:
    """Where the parts begin, and where the last one ends."""
    sizes = (
        _NUMBER.itemsize * (int(about["documents"]) + 1),
        ITEM.itemsize * int(about["items"]),
        _NUMBER.itemsize * int(about["files"]),
        int(about["names"]),
    )
    return [PAGE + sum(sizes[:i]) for i in range(len(sizes) + 1)]
