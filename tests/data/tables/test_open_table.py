"""Tables in memory of the process and in files are those of a reference, under every policy."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_hdp.data import TokenFile, TokenFileError
from megatron_hdp.data.tables import (
    SequenceTable,
    TableFacts,
    count_documents,
    open_source,
    split_documents,
)
from megatron_hdp.data.tables.cache_file import TableWriter
from megatron_hdp.data.tables.columns import column_types
from megatron_hdp.data.tables.cutting import Cutting, Survey
from megatron_hdp.runtime.health import fingerprint
from tests.data.tables.pairs import everything, open_table, write_index, write_pair

shared_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
corpora = st.lists(st.lists(st.integers(0, 12), max_size=4), min_size=1, max_size=12)


@contextmanager
def in_small_pieces(size):
    """Reads, cuts and compares so few at once that documents span pieces."""
    with ExitStack() as stack:
        for name in ("index_file._PIECE", "index_checks._PIECE", "tables.cutting._MOST_ROWS"):
            stack.enter_context(mock.patch(f"megatron_hdp.data.{name}", size))
        yield


def reference(documents, max_length, policy, part):
    """Rows (document, start, begin, length, labels) as the rules say, one token at a time."""
    rows, begin = [], 0
    for number, parts in enumerate(documents):
        total = sum(parts)
        if number in part and total:
            pieces = range(0, total, max_length) if policy == "split" else [0]
            for start in pieces:
                length = min(total - start, max_length)
                has_next = policy == "split" and start + length < total
                rows.append((number, start, begin + start, length, length - (not has_next)))
        begin += total
    return [list(column) for column in zip(*rows, strict=True)]


@st.composite
def cuttings(draw):
    documents = draw(corpora)
    stop = draw(st.integers(0, len(documents)))
    part = range(draw(st.integers(0, stop)), stop)
    policy = draw(st.sampled_from(["error", "truncate", "split"]))
    longest = max(map(sum, documents))
    most = max(longest, 1) if policy == "error" else draw(st.integers(1, max(longest, 1)))
    return documents, dict(max_length=most, long_sequence=policy, documents=part)


@shared_folder
@given(cuttings(), st.integers(1, 5))
def test_every_table_is_that_of_the_reference(tmp_path_factory, case, piece):
    documents, options = case
    folder = tmp_path_factory.mktemp("case")
    prefix = write_pair(folder / "data", documents)
    columns = reference(documents, *options.values())
    with in_small_pieces(piece):
        if not columns:
            for cache in (None, folder):
                with pytest.raises(ValueError, match="no sequence to train on"):
                    open_table(prefix, cache_folder=cache, **options)
            return
        private = open_table(prefix, **options)
        cached = open_table(prefix, cache_folder=folder, **options)
    again = open_table(prefix, cache_folder=folder, **options)
    file = TokenFile(prefix)
    built = SequenceTable.build(file.lengths, **options)
    for table in (private, cached, again, built):
        facts, found = everything(table)
        assert found == columns
        assert facts == private.facts
    assert_facts(private, documents, options, columns)


def assert_facts(table, documents, options, columns):
    lengths = np.array(columns[3])
    totals = [sum(documents[number]) for number in options["documents"]]
    num_long = sum(total > options["max_length"] for total in totals)
    assert len(table) == len(lengths) and table.mean_length == lengths.mean()
    assert table.facts == TableFacts(
        num_sequences=len(lengths),
        num_tokens=lengths.sum(),
        longest=lengths.max(),
        corpus=fingerprint(lengths.tobytes()),
        first_document=options["documents"].start,
        num_documents=len(totals),
        num_empty=totals.count(0),
        num_truncated=num_long * (options["long_sequence"] == "truncate"),
        num_split=num_long * (options["long_sequence"] == "split"),
    )


def test_a_column_written_to_a_wrong_place_is_found(tmp_path):
    """The comparison above can fail."""
    prefix = write_pair(tmp_path / "data", [[3], [5], [4]])
    put = TableWriter.put

    def shifted(self, name, first, values):
        put(self, name, first, values[::-1].copy() if name == "length" else values)

    with mock.patch.object(TableWriter, "put", shifted):
        cached = open_table(prefix, max_length=9, cache_folder=tmp_path)
    assert everything(cached) != everything(open_table(prefix, max_length=9))


def test_the_reader_reads_a_tables_sequences(tmp_path):
    prefix = write_pair(tmp_path / "data", [[3], [], [2, 5], [4]])
    options = dict(max_length=3, long_sequence="split", cache_folder=tmp_path / "caches")
    table, reader = open_source(prefix, **options)
    rows = np.arange(len(table))
    tokens = [
        reader.read(begin, count).tolist()
        for begin, count in zip(table.begins(rows).tolist(), table.lengths(rows), strict=True)
    ]
    assert [token for piece in tokens for token in piece] == list(range(14))
    assert reader.fingerprint() == TokenFile(prefix).reader.fingerprint()


@pytest.mark.parametrize("cached", [False, True])
def test_a_token_file_that_is_too_short_is_refused(tmp_path, cached):
    prefix = write_pair(tmp_path / "data", [[3], [5]])
    options = dict(max_length=9, cache_folder=tmp_path if cached else None)
    open_source(prefix, **options)
    (tmp_path / "data.bin").write_bytes(b"12345")
    with pytest.raises(TokenFileError, match=r"data\.bin has 5 bytes, its \.idx promises 16"):
        open_source(prefix, **options)


def test_the_parts_of_a_split_are_tables_of_their_own(tmp_path):
    prefix = write_pair(tmp_path / "data", [[n] for n in range(1, 11)])
    parts = split_documents(count_documents(prefix), "6,4,0")[:2]
    tables = [
        open_table(prefix, max_length=99, documents=part, cache_folder=tmp_path) for part in parts
    ]
    found = [table.documents(np.arange(len(table))).tolist() for table in tables]
    assert found == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]


@pytest.mark.parametrize(
    ("documents", "max_length", "policy", "bytes_of_a_row"),
    [
        ([[3], [2], [7]], 9, "error", 12),
        ([[3], [2], [7]], 3, "truncate", 12),
        ([[3], [], [7]], 9, "error", 16),
        ([[3], [7]], 4, "split", 16),
        ([[2**31 - 1] * 3, [5]], 2**40, "error", 16),
        ([[2**31 - 1] * 3, [], [5]], 2**40, "error", 20),
        ([[2**31 - 1] * 3, [5]], 2**31, "truncate", 12),
    ],
)
def test_columns_are_as_small_as_their_numbers(
    tmp_path, documents, max_length, policy, bytes_of_a_row
):
    prefix = tmp_path / "data"
    write_index(f"{prefix}.idx", documents)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2**40)  # has holes only
    options = dict(max_length=max_length, long_sequence=policy)
    for cache in (None, tmp_path):
        table = open_table(prefix, cache_folder=cache, **options)
        assert table.num_bytes == bytes_of_a_row * len(table)
        assert everything(table)[1] == reference(documents, max_length, policy, range(9))


def test_documents_beyond_32_bits_have_numbers_of_64():
    cutting = Cutting(9, "error", range(2**33, 2**33 + 5), 2**34)
    survey = Survey(cutting, num_sequences=4, num_empty=1, longest_document=9)
    assert column_types(survey) == {"begin": "<i8", "length": "<u4", "document": "<i8"}


@pytest.mark.parametrize("cached", [False, True])
def test_a_long_document_is_named(tmp_path, cached):
    prefix = write_pair(tmp_path / "data", [[3], [5, 6], [4], [30]])
    options = dict(max_length=9, cache_folder=tmp_path / "caches" if cached else None)
    with pytest.raises(ValueError, match="document 1 has 11 tokens, .* is 9 .2 documents .* 30"):
        open_table(prefix, **options)
    if cached:
        assert [path.suffix for path in (tmp_path / "caches").iterdir()] == [".lock"]
