"""Small ``.bin/.idx`` pairs for tests of tables, written without a tokenizer."""

import struct
from pathlib import Path

import numpy as np

from megatron_hdp.data.tables import open_source


def write_index(path, documents, dtype_code=8, pointers=None):
    """Write an ``.idx``; ``documents`` lists the lengths of each one's sequences."""
    lengths = [length for document in documents for length in document]
    borders = np.cumsum([0, *map(len, documents)])
    token_bytes = {8: 2, 4: 4}[dtype_code]
    if pointers is None:
        pointers = (np.cumsum([0, *lengths])[:-1] if lengths else np.array([])) * token_bytes
    with open(path, "wb") as file:
        file.write(
            struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, dtype_code, len(lengths), len(borders))
        )
        for column, dtype in ((lengths, "<i4"), (pointers, "<i8"), (borders, "<i8")):
            np.asarray(column, dtype=dtype).tofile(file)
    return path


def write_pair(prefix, documents, **options):
    """The same with a ``.bin`` of tokens 0, 1, 2 .. (of 16 bits); returns the prefix."""
    write_index(f"{prefix}.idx", documents, **options)
    num_tokens = sum(length for document in documents for length in document)
    Path(f"{prefix}.bin").write_bytes(np.arange(num_tokens).astype(np.uint16).tobytes())
    return str(prefix)


def everything(table):
    """Every answer of a table, and what is known of it."""
    rows = np.arange(len(table))
    columns = (table.documents, table.starts, table.begins, table.lengths, table.num_labels)
    return table.facts, [column(rows).tolist() for column in columns]


def open_table(prefix, **options):
    """The sequences alone."""
    return open_source(prefix, **options)[0]
