"""The writer leaves a pair that megatron-core reads, or nothing."""

import os
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_hdp.data import TokenFile, TokenWriter


def write(prefix, documents, vocab_size=257):
    with TokenWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add(np.asarray(document))
    return writer


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, np.uint16), (128_256, np.int32)])
def test_megatron_and_we_read_the_same_documents(tmp_path, vocab_size, dtype):
    documents = [[1, 2, 256], [3], [4, 5]]
    writer = write(tmp_path / "new" / "data", documents, vocab_size)
    assert (writer.num_documents, writer.num_tokens) == (3, 6)
    ours, theirs = TokenFile(tmp_path / "new" / "data"), IndexedDataset(str(tmp_path / "new/data"))
    assert ours.dtype == theirs.index.dtype == dtype
    assert theirs.document_indices.tolist() == [0, 1, 2, 3]
    for d, document in enumerate(documents):
        assert ours.read(d, 0, len(document)).tolist() == theirs[d].tolist() == document
    assert sorted(os.listdir(tmp_path / "new")) == ["data.bin", "data.idx"]


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_nothing_and_keeps_an_older_pair(tmp_path, existing, failure):
    prefix = tmp_path / "data"
    if existing:
        write(prefix, [[7, 8]])
    with pytest.raises(failure), TokenWriter(prefix, 257) as writer:
        writer.add(np.array([1, 2, 3]))
        raise failure
    assert sorted(os.listdir(tmp_path)) == (["data.bin", "data.idx"] if existing else [])
    if existing:
        assert TokenFile(prefix).read(0, 0, 2).tolist() == [7, 8]


def test_a_failure_while_writing_the_index_leaves_nothing(tmp_path, monkeypatch):
    def fail(self, path):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("megatron_hdp.megatron.indexed_writer.IndexedDatasetBuilder.finalize", fail)
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path / "data", [[1]])
    assert os.listdir(tmp_path) == []


def test_a_disk_that_is_full_to_the_last_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="no space"), TokenWriter(tmp_path / "data", 257) as writer:
        writer.add(np.array([1, 2, 3]))
        writer._builder.data_file = Full(writer._builder.data_file)
    assert os.listdir(tmp_path) == []


class Full:
    """A file whose last bytes find no room."""

    def __init__(self, file):
        self.file = file

    def close(self):
        self.file.close()
        raise OSError("no space left on device")


def test_writing_twice_replaces_the_pair(tmp_path):
    write(tmp_path / "data", [[1, 2]])
    write(tmp_path / "data", [[3]])
    assert TokenFile(tmp_path / "data").lengths.tolist() == [1]


@pytest.mark.parametrize(
    ("document", "message"),
    [([], "document 1 has 0 tokens"), ([257], "expected 0 to 256"), ([-1], "expected 0 to 256")],
)
def test_bad_documents(tmp_path, document, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "data", [[1], document])
    assert os.listdir(tmp_path) == []
