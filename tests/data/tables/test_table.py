"""The sequence table under every policy."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_hdp.data.tables import SequenceTable

# A busy machine is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
LENGTHS = np.array([3, 0, 10, 1, 4, 8, 0])


def rows(table):
    every = np.arange(len(table))
    columns = (table.documents, table.starts, table.lengths, table.num_labels)
    return list(zip(*(column(every).tolist() for column in columns), strict=True))


def test_error_keeps_documents_and_counts_empty_ones():
    table = SequenceTable.build(LENGTHS, max_length=10)
    assert rows(table) == [(0, 0, 3, 2), (2, 0, 10, 9), (3, 0, 1, 0), (4, 0, 4, 3), (5, 0, 8, 7)]
    assert (table.num_empty, table.num_truncated, table.num_split) == (2, 0, 0)


def test_error_names_document_lengths_and_remedies():
    with pytest.raises(ValueError) as caught:
        SequenceTable.build(LENGTHS, max_length=4)
    message = str(caught.value)
    for part in (
        "document 2 has 10 tokens",
        "context length is 4",
        "2 documents",
        "--hdp-long-sequence truncate or split",
        "--seq-length",
    ):
        assert part in message


def test_truncate():
    table = SequenceTable.build(LENGTHS, max_length=4, long_sequence="truncate")
    assert rows(table) == [(0, 0, 3, 2), (2, 0, 4, 3), (3, 0, 1, 0), (4, 0, 4, 3), (5, 0, 4, 3)]
    assert (table.num_empty, table.num_truncated, table.num_split) == (2, 2, 0)


def test_split():
    table = SequenceTable.build(LENGTHS, max_length=4, long_sequence="split")
    assert rows(table) == [
        (0, 0, 3, 2),
        (2, 0, 4, 4),
        (2, 4, 4, 4),
        (2, 8, 2, 1),
        (3, 0, 1, 0),
        (4, 0, 4, 3),
        (5, 0, 4, 4),
        (5, 4, 4, 3),
    ]
    assert (table.num_empty, table.num_truncated, table.num_split) == (2, 0, 2)


@pytest.mark.parametrize("documents", [range(2, 5), slice(2, 5)])
def test_documents_are_numbered_in_the_whole_corpus(documents):
    table = SequenceTable.build(LENGTHS, max_length=10, documents=documents)
    assert table.documents(np.arange(3)).tolist() == [2, 3, 4]
    assert table.num_empty == 0


def test_a_long_document_outside_the_split_does_not_matter():
    assert len(SequenceTable.build(LENGTHS, max_length=4, documents=range(2))) == 1


@pytest.mark.parametrize("policy", ["error", "truncate", "split"])
@pytest.mark.parametrize("documents", [range(1, 2), range(3, 3), slice(5, 2)])
def test_nothing_to_train_on_is_an_error(policy, documents):
    with pytest.raises(ValueError, match="no sequence to train on.*--data-path and --split"):
        SequenceTable.build(LENGTHS, max_length=9, long_sequence=policy, documents=documents)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 0}, "context length is 0"),
        ({"max_length": 9, "long_sequence": "cut"}, "'cut': expected one of error, truncate"),
        ({"max_length": 9, "documents": range(0, 4, 2)}, "step 1"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        SequenceTable.build(LENGTHS, **options)


@unhurried
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any),
    st.integers(1, 45),
    st.sampled_from(["truncate", "split"]),
)
def test_every_next_token_pair_is_counted_once(lengths, max_length, policy):
    table = SequenceTable.build(np.array(lengths), max_length=max_length, long_sequence=policy)
    pairs = {}
    for document, start, length, num_labels in rows(table):
        assert 1 <= length <= max_length
        for position in range(start, start + num_labels):
            pairs[document, position] = pairs.get((document, position), 0) + 1
    cut = max_length if policy == "truncate" else max(lengths)
    expected = {(d, p) for d, n in enumerate(lengths) for p in range(min(n, cut) - 1)}
    assert set(pairs) == expected
    assert all(count == 1 for count in pairs.values())
    assert len({document for document, *_ in rows(table)}) + table.num_empty == len(lengths)
