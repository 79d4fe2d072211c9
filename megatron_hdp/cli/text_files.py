"""Text files of numbers, one a line: read in pieces, and a file that is no text is named."""

import os
from collections.abc import Iterator

_PIECE_BYTES = 2**20
_LONGEST_LINE = 4096
_MARK = b"\xef\xbb\xbf"  # of UTF-8, which some editors put first


def pieces(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes]]:
    """Yield the file in pieces of whole lines, each with the number of its first line.

    Raises:
        ValueError: a line is too long to hold a number; names file and line.
    """
    with open(path, "rb") as stream:
        number, rest = 1, stream.read(len(_MARK)).removeprefix(_MARK)
        while piece := stream.read(_PIECE_BYTES):
            lines, end, rest = (rest + piece).replace(b"\r", b"\n").rpartition(b"\n")
            if len(rest) > _LONGEST_LINE:
                found = shown(rest)
                raise ValueError(
                    f"{path}: found a line of more than {_LONGEST_LINE:,} bytes that begins with "
                    f"{found}, expected a text file with one number a line"
                )
            yield number, lines + end
            number += lines.count(b"\n") + len(end)
        yield number, rest


def numbered_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """Yield every line that says something, with its number."""
    for first, piece in pieces(path):
        yield from lines_of(first, piece)


def lines_of(first: int, piece: bytes) -> Iterator[tuple[int, str]]:
    """Yield the lines of a piece that say something, with their numbers."""
    for number, line in enumerate(piece.split(b"\n"), start=first):
        if text := line.decode("utf-8", errors="replace").strip():
            yield number, text


def shown(line: bytes | str) -> str:
    """The beginning of a line, quoted."""
    text = line if isinstance(line, str) else line[:240].decode("utf-8", errors="replace")
    return repr(text[:60])
