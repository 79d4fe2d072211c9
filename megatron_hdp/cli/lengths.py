"""The sequence lengths of a global batch, from a text file or from an ``.idx``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def read_lengths(path: str) -> "npt.NDArray[np.int64]":
    """Return the lengths in a file: one integer a line, or the documents of an ``.idx``.

    Empty documents of an ``.idx`` are left out, as training leaves them out.

    Raises:
        ValueError: a line is no positive integer (named), or there is no length at all.
    """
    import numpy as np

    from megatron_hdp.data import read_document_index

    if path.endswith(".idx"):
        lengths = read_document_index(path).lengths
        lengths = lengths[lengths > 0]
    else:
        lengths = np.array(_parse_lines(path), dtype=np.int64)
    if len(lengths) == 0:
        raise ValueError(f"{path} has no sequence length, expected one positive integer a line")
    return lengths


def _parse_lines(path: str) -> list[int]:
    lengths = []
    with open(path, encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            text = line.strip()
            if not text:
                continue
            if not (text.isascii() and text.isdigit()) or not 0 < int(text) < 2**63:
                raise ValueError(
                    f"{path}, line {number}: found {text[:60]!r}, expected the length of one "
                    "sequence, an integer of at least 1"
                )
            lengths.append(int(text))
    return lengths
