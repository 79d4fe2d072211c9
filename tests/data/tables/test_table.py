"""What a table of sequences refuses; `test_open_table` compares its rows with a reference."""

import numpy as np
import pytest

from megatron_hdp.data.tables import SequenceTable

LENGTHS = np.array([3, 0, 10, 1, 4, 8, 0])


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


def test_documents_are_numbered_in_the_whole_corpus():
    table = SequenceTable.build(LENGTHS, max_length=10, documents=range(2, 5))
    assert table.documents(np.arange(3)).tolist() == [2, 3, 4]
    assert table.facts.num_empty == 0


def test_a_long_document_outside_the_split_does_not_matter():
    assert len(SequenceTable.build(LENGTHS, max_length=4, documents=range(2))) == 1


@pytest.mark.parametrize("policy", ["error", "truncate", "split"])
@pytest.mark.parametrize("documents", [range(1, 2), range(3, 3), range(5, 2), range(9, 12)])
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
