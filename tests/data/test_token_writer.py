"""The writer leaves a pair that is Megatron's to the byte, or nothing."""

import os
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from megatron_hdp.data import TokenFile, TokenFileError, TokenWriter
from megatron_hdp.data import token_writer as module
from megatron_hdp.data.token_writer import concatenate_pairs, token_dtype


def write(prefix, documents, vocab_size=257):
    with TokenWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add(np.asarray(document))
    return writer


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
    def fail(path, *rest):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("megatron_hdp.data.token_writer._write_index", fail)
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path / "data", [[1]])
    assert os.listdir(tmp_path) == []


def test_a_disk_that_is_full_to_the_last_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="no space"), TokenWriter(tmp_path / "data", 257) as writer:
        writer.add(np.array([1, 2, 3]))
        writer._file = Full(writer._file)
    assert os.listdir(tmp_path) == []


class Full:
    """A file whose last bytes find no room."""

    def __init__(self, file):
        self.file = file

    def close(self):
        self.file.close()
        raise OSError("no space left on device")


def test_writing_again_replaces_the_pair(tmp_path):
    for documents in ([[1, 2]], [[3]], []):
        write(tmp_path / "data", documents)
        assert TokenFile(tmp_path / "data").lengths.tolist() == list(map(len, documents))


@pytest.mark.parametrize(
    ("document", "message"),
    [([], "document 1 has 0 tokens"), ([257], "expected 0 to 256"), ([-1], "expected 0 to 256")],
)
def test_bad_documents(tmp_path, document, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "data", [[1], document])
    assert os.listdir(tmp_path) == []


def megatrons(prefix, documents, dtype):
    """The pair that Megatron's own builder writes."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
    return files(prefix)


def files(prefix):
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")]


def drawn(num_documents, vocab_size, seed=0):
    draw = np.random.default_rng(seed)
    return [draw.integers(0, vocab_size, draw.integers(1, 50)) for _ in range(num_documents)]


@pytest.mark.parametrize("vocab_size", [1, 257, 65_499, 65_500, 65_536, 128_256])
def test_the_integer_type_is_megatrons(vocab_size):
    assert token_dtype(vocab_size) == DType.optimal_dtype(vocab_size)


@pytest.mark.parametrize("vocab_size", [257, 128_256])
@pytest.mark.parametrize("at_once", [3, 2**18])
def test_the_bytes_are_megatrons(tmp_path, monkeypatch, vocab_size, at_once):
    monkeypatch.setattr(module, "_DOCUMENTS_AT_ONCE", at_once)
    documents = drawn(10, vocab_size)
    expected = megatrons(tmp_path / "theirs", documents, token_dtype(vocab_size).type)
    writer = write(tmp_path / "new" / "ours", documents, vocab_size)
    assert files(tmp_path / "new" / "ours") == expected
    assert (writer.num_documents, writer.num_tokens) == (10, sum(map(len, documents)))
    theirs = IndexedDataset(str(tmp_path / "new" / "ours"))
    assert theirs.document_indices.tolist() == list(range(11))
    with TokenWriter(tmp_path / "batch", vocab_size, durable=True) as writer:
        writer.add_batch(np.array([], dtype=np.int64), np.array([], dtype=np.int64))
        writer.add_batch(
            np.concatenate(documents).astype(np.int32), np.array(list(map(len, documents)))
        )
    assert files(tmp_path / "batch") == expected
    for i, part in enumerate((documents[:4], [], documents[4:])):
        write(tmp_path / f"part{i}", part, vocab_size)
    concatenate_pairs([tmp_path / f"part{i}" for i in range(3)], tmp_path / "joined")
    assert files(tmp_path / "joined") == expected
    assert not [name for name in os.listdir(tmp_path) if "tmp" in name]


def test_the_bad_document_of_a_batch_is_named(tmp_path):
    with TokenWriter(tmp_path / "data", 257) as writer:
        writer.add(np.array([1]))
        with pytest.raises(ValueError, match="document 2 has the token id 300"):
            writer.add_batch(np.array([1, 2, 300, 4]), np.array([2, 2]))
        with pytest.raises(ValueError, match="document 3 has 0 tokens"):
            writer.add_batch(np.array([1, 2]), np.array([1, 1, 0]))
    assert TokenFile(tmp_path / "data").lengths.tolist() == [1]


def test_files_are_copied_where_the_kernel_cannot(tmp_path, monkeypatch):
    def cannot(*arguments):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", cannot, raising=False)
    monkeypatch.setattr(module, "_COPY_BYTES", 7)
    documents = drawn(10, 257)
    for i in range(2):
        write(tmp_path / f"part{i}", documents[5 * i : 5 * i + 5])
    concatenate_pairs([tmp_path / "part0", tmp_path / "part1"], tmp_path / "joined")
    write(tmp_path / "whole", documents)
    assert files(tmp_path / "joined") == files(tmp_path / "whole")


def test_a_full_disk_while_copying_names_the_file_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    write(tmp_path / "part", [[1, 2]])
    monkeypatch.setattr(os, "copy_file_range", full, raising=False)
    with pytest.raises(OSError, match="No space left on device: '.*joined"):
        concatenate_pairs([tmp_path / "part", tmp_path / "part"], tmp_path / "joined")
    assert sorted(os.listdir(tmp_path)) == ["part.bin", "part.idx"]


def test_pairs_that_do_not_belong_together(tmp_path):
    write(tmp_path / "small", [[1, 2]])
    write(tmp_path / "large", [[1, 2]], 128_256)
    with pytest.raises(TokenFileError, match="int32, expected uint16"):
        concatenate_pairs([tmp_path / "small", tmp_path / "large"], tmp_path / "joined")
    (tmp_path / "small.bin").write_bytes(b"123")
    with pytest.raises(TokenFileError, match="has 3 bytes.*expected 4 bytes"):
        concatenate_pairs([tmp_path / "small"], tmp_path / "joined")
