"""A long column is written in whole large pages, which the kernel may keep whole."""

import os
from unittest import mock

import numpy as np
import pytest

from megatron_hdp.data.tables import cache_file
from megatron_hdp.data.tables.cache_file import TableOrigin, TableWriter
from megatron_hdp.data.tables.columns import TableFacts

LARGE_PAGE = 2 * 1024 * 1024
NUM_ROWS = 1_500_000  # 6 and 12 MB: 2 and 5 large pages, and some more
PIECE = 100_001
TYPES = {"begin": "<i8", "length": "<u4"}
FACTS = dict.fromkeys(("corpus", "first_document", "num_empty", "num_truncated", "num_split"), 0)
FACTS |= dict.fromkeys(("num_sequences", "num_tokens", "num_documents"), NUM_ROWS)


@pytest.fixture
def noted():
    """The size and place of each write."""
    found, pwrite = [], os.pwrite

    def noting(file, data, place):
        found.append((len(data), place))
        return pwrite(file, data, place)

    with mock.patch.object(cache_file.os, "pwrite", side_effect=noting):
        yield found


def test_pieces_of_any_size_are_written_as_whole_large_pages(tmp_path, noted):
    columns = {name: np.arange(NUM_ROWS).astype(dtype) for name, dtype in TYPES.items()}
    with TableWriter(tmp_path / "made", NUM_ROWS, TYPES) as writer:
        for first in range(0, NUM_ROWS, PIECE):
            for name, values in columns.items():
                writer.put(name, first, values[first : first + PIECE])
        assert sum(size for size, _ in noted) == (2 + 5) * LARGE_PAGE
        assert all(size % LARGE_PAGE == place % LARGE_PAGE == 0 for size, place in noted)
        writer.publish(TableFacts(longest=1, **FACTS), TableOrigin("", 0, "", "<u2", 0))
    found = cache_file.read_table(tmp_path / "made").columns
    assert np.array_equal(found.begin, columns["begin"])
    assert np.array_equal(found.length, columns["length"])


def test_a_gap_between_pieces_is_no_column(tmp_path):
    with TableWriter(tmp_path / "made", NUM_ROWS, TYPES) as writer:
        writer.put("length", 0, np.zeros(3, dtype=np.uint32))
        with pytest.raises(ValueError, match="column length goes on at another row than 4"):
            writer.put("length", 4, np.zeros(3, dtype=np.uint32))
