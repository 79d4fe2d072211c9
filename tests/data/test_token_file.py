"""TokenFile reads what megatron-core wrote, and refuses every broken pair with a clear message."""

import os
import struct

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from megatron_hdp.data import TokenFile, TokenFileError, TokenFileNotFoundError

DOCUMENTS = [[5, 6, 7], [], [8], [9, 10, 11, 12, 13]]


def write_pair(prefix, documents=DOCUMENTS, dtype=np.uint16, sequence_length=None):
    """Write documents with megatron-core's builder, each in sequences of ``sequence_length``."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        step = sequence_length or max(len(document), 1)
        parts = [len(document[i : i + step]) for i in range(0, len(document), step)]
        builder.add_document(np.asarray(document), parts)
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def patch_bytes(path, offset, new):
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(new)] = new
    path.write_bytes(raw)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint8, np.int64])
@pytest.mark.parametrize("sequence_length", [None, 1, 2])
@pytest.mark.parametrize("piece", [1, 2, 2**18])
def test_reads_documents_written_by_megatron(tmp_path, monkeypatch, dtype, sequence_length, piece):
    monkeypatch.setattr("megatron_hdp.data.index_file._PIECE", piece)
    file = TokenFile(write_pair(tmp_path / "data", dtype=dtype, sequence_length=sequence_length))
    assert file.reader.dtype == dtype
    assert file.lengths.tolist() == [3, 0, 1, 5]
    assert file.lengths.dtype == np.int64
    for d, document in enumerate(DOCUMENTS):
        tokens = file.read(d, 0, len(document))
        assert tokens.dtype == np.int64
        assert tokens.tolist() == document
    assert file.read(3, 1, 4).tolist() == [10, 11, 12]
    assert file.read(3, 5, 5).tolist() == []


def test_agrees_with_megatron_on_random_documents(tmp_path):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 50_000, size=n).tolist() for n in rng.integers(1, 300, size=200)]
    prefix = write_pair(tmp_path / "data", documents)
    ours, theirs = TokenFile(prefix), IndexedDataset(prefix)
    assert np.array_equal(ours.lengths, theirs.sequence_lengths)
    for d in range(len(documents)):
        assert np.array_equal(ours.read(d, 0, int(ours.lengths[d])), theirs[d])


def test_a_subset_index_over_a_larger_bin_is_legal(tmp_path):
    prefix = write_pair(tmp_path / "data")
    with open(f"{prefix}.bin", "ab") as stream:
        stream.write(b"more")
    assert TokenFile(prefix).read(3, 0, 5).tolist() == DOCUMENTS[3]


def test_only_empty_documents(tmp_path):
    file = TokenFile(write_pair(tmp_path / "data", [[], []]))
    assert file.lengths.tolist() == [0, 0]
    assert file.read(1, 0, 0).tolist() == []


@pytest.mark.parametrize("span", [(-1, 2), (0, 10), (9, 1), (3, -1)])
def test_reading_outside_what_the_index_covers_is_refused(tmp_path, span):
    reader = TokenFile(write_pair(tmp_path / "data")).reader
    assert reader.read(0, 9).tolist() == [5, 6, 7, 8, 9, 10, 11, 12, 13]
    with pytest.raises(ValueError, match=r"data\.bin: its \.idx covers tokens \[0, 9\)"):
        reader.read(*span)


@pytest.mark.parametrize("span", [(-1, 1), (0, 4), (2, 1)])
def test_reading_outside_a_document_is_refused(tmp_path, span):
    file = TokenFile(write_pair(tmp_path / "data"))
    with pytest.raises(ValueError, match=r"document 0 .* it has tokens \[0, 3\)"):
        file.read(0, *span)


@pytest.mark.parametrize(
    ("suffix", "message"),
    [
        ("idx", r"no index file .*data\.idx.*preprocess"),
        ("bin", r"no token file .*\.bin.*18 bytes"),
    ],
)
def test_a_missing_file(tmp_path, suffix, message):
    prefix = write_pair(tmp_path / "data")
    (tmp_path / f"data.{suffix}").unlink()
    with pytest.raises(TokenFileNotFoundError, match=message) as caught:
        TokenFile(prefix)
    assert isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize(
    ("suffix", "size", "message"),
    [
        ("bin", 17, r"has 17 bytes, its \.idx promises 18"),
        *(("idx", size, "begins with" if size < 9 else "truncated") for size in (0, 5, 20, 34, 60)),
    ],
)
def test_a_truncated_file_is_found_at_open(tmp_path, suffix, size, message):
    prefix = write_pair(tmp_path / "data")
    os.truncate(f"{prefix}.{suffix}", size)
    with pytest.raises(TokenFileError, match=message):
        TokenFile(prefix)


SEQUENCES_AT = 34  # of DOCUMENTS: 3 sequences (the empty document has none), 5 borders
POINTERS_AT = SEQUENCES_AT + 3 * 4
BORDERS_AT = POINTERS_AT + 3 * 8


@pytest.mark.parametrize(
    ("offset", "new", "message"),
    [
        (0, b"PK\x03\x04", "begins with .*something else"),
        (9, struct.pack("<Q", 2), "index version 2, expected 1"),
        (17, b"\x06", "dtype code 6, expected an integer type"),
        (17, b"\x63", "dtype code 99"),
        (18, struct.pack("<Q", 2**60), "truncated"),
        (SEQUENCES_AT, struct.pack("<i", -3), "sequence 0 the length -3"),
        (POINTERS_AT, struct.pack("<q", -2), "byte pointer -2 for sequence 0, expected a multiple"),
        (POINTERS_AT, struct.pack("<q", 2**63 - 2), "byte pointer 9223372036854775806 for"),
        (POINTERS_AT + 8, struct.pack("<q", 2**62 + 2), "byte pointer .* for sequence 1"),
        (POINTERS_AT, struct.pack("<q", 2**62), r"\.bin has 18 bytes, its \.idx promises 4,611,"),
        (POINTERS_AT + 8, struct.pack("<q", 7), "byte pointer 7 for sequence 1, .* multiple of 2"),
        (POINTERS_AT + 8, struct.pack("<q", 4), "sequence 1 begins at byte 4, inside sequence 0"),
        (POINTERS_AT, struct.pack("<q", 8), "sequence 2 begins at byte 8, inside sequence 0"),
        (BORDERS_AT, struct.pack("<q", 1), "document borders"),
        (BORDERS_AT + 8, struct.pack("<q", 3), "document borders"),
        (BORDERS_AT + 4 * 8, struct.pack("<q", 2), "document borders"),
    ],
)
@pytest.mark.parametrize("piece", [1, 2, 2**18])
def test_damaged_idx(tmp_path, monkeypatch, offset, new, message, piece):
    monkeypatch.setattr("megatron_hdp.data.index_file._PIECE", piece)
    monkeypatch.setattr("megatron_hdp.data.index_checks._PIECE", piece)
    prefix = write_pair(tmp_path / "data")
    patch_bytes(tmp_path / "data.idx", offset, new)
    with pytest.raises(TokenFileError, match=message):
        TokenFile(prefix)


def test_a_document_may_be_there_again(tmp_path):
    """Some weigh documents by naming them twice in the index."""
    prefix = write_pair(tmp_path / "data", [[1, 2], [3, 4], [5, 6]])
    patch_bytes(tmp_path / "data.idx", POINTERS_AT + 2 * 8, struct.pack("<q", 0))
    file = TokenFile(prefix)
    assert [file.read(d, 0, 2).tolist() for d in range(3)] == [[1, 2], [3, 4], [1, 2]]


def test_a_document_with_a_hole_is_refused(tmp_path):
    prefix = write_pair(tmp_path / "data", [[1], [2, 3, 4, 5]], sequence_length=2)
    patch_bytes(tmp_path / "data.idx", SEQUENCES_AT + 3 * 4 + 2 * 8, struct.pack("<q", 8))
    with pytest.raises(TokenFileError, match=r"sequence 2 of document 1 .*byte 8, expected 6"):
        TokenFile(prefix)


def test_dtype_codes_are_those_of_megatron():
    from megatron_hdp.data.index_file import _DTYPE_OF_CODE

    assert {t.value: t.name for t in DType if not t.name.startswith("float")} == {
        code: np.dtype(dtype).name for code, dtype in _DTYPE_OF_CODE.items()
    }


def test_documents_may_lie_in_any_order(tmp_path):
    prefix = write_pair(tmp_path / "data", [[1, 2], [3, 4]])
    at = SEQUENCES_AT + 2 * 4
    patch_bytes(tmp_path / "data.idx", at, struct.pack("<qq", 4, 0))
    file = TokenFile(prefix)
    assert [file.read(d, 0, 2).tolist() for d in (0, 1)] == [[3, 4], [1, 2]]


def test_a_bin_that_is_cut_while_it_is_read_is_an_error(tmp_path):
    """A page that is gone from a memory-mapped file would kill the process without a word."""
    prefix = write_pair(tmp_path / "data", [list(range(20_000)), [1]])
    file = TokenFile(prefix)
    assert file.read(0, 0, 5).tolist() == [0, 1, 2, 3, 4]
    os.truncate(f"{prefix}.bin", 10)
    with pytest.raises(TokenFileError, match=r"data\.bin has 10 bytes while .* promises 40,002"):
        file.read(0, 10_000, 20_000)
    assert file.read(0, 0, 5).tolist() == [0, 1, 2, 3, 4]


def test_an_idx_that_is_cut_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    prefix = write_pair(tmp_path / "data")
    read = os.preadv

    def cut_first(*args):
        os.truncate(f"{prefix}.idx", 50)
        return read(*args)

    monkeypatch.setattr(os, "preadv", cut_first)
    with pytest.raises(TokenFileError, match=r"data\.idx ended at byte 50 while it was read"):
        TokenFile(prefix)


def test_an_unreadable_disk_names_the_file(tmp_path, monkeypatch):
    file = TokenFile(write_pair(tmp_path / "data"))

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match=r"Input/output error: '.*data\.bin'"):
        file.read(0, 0, 1)


def test_files_are_closed_with_their_reader(tmp_path):
    prefix = write_pair(tmp_path / "data")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        TokenFile(prefix).read(0, 0, 1)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("num_tokens", [1, 2048, 90_000, 2_000_000])
def test_a_fingerprint_tells_another_bin_of_equal_lengths(tmp_path, num_tokens):
    tokens = np.random.default_rng(0).integers(0, 60_000, num_tokens)
    one = TokenFile(write_pair(tmp_path / "one", [tokens])).reader.fingerprint()
    other = TokenFile(write_pair(tmp_path / "other", [tokens ^ 1])).reader.fingerprint()
    tokens[-1] += 1
    end = TokenFile(write_pair(tmp_path / "end", [tokens])).reader.fingerprint()
    assert len({one, other, end}) == 3
    assert one == TokenFile(tmp_path / "one").reader.fingerprint()


def test_a_fingerprint_takes_a_few_small_reads(tmp_path, monkeypatch):
    file = TokenFile(write_pair(tmp_path / "data", [np.zeros(3_000_000, dtype=np.int64)]))
    places, read = [], os.preadv

    def counted(descriptor, buffers, place):
        places.append(place)
        return read(descriptor, buffers, place)

    monkeypatch.setattr(os, "preadv", counted)
    file.reader.fingerprint()
    assert len(places) == 48
    assert (min(places), max(places)) == (0, 6_000_000 - 4096)


def test_what_lies_behind_the_documents_does_not_count(tmp_path):
    file = TokenFile(write_pair(tmp_path / "data"))
    before = file.reader.fingerprint()
    with open(tmp_path / "data.bin", "ab") as stream:
        stream.write(b"more")
    assert TokenFile(tmp_path / "data").reader.fingerprint() == before
    patch_bytes(tmp_path / "data.bin", 17, b"\x01")
    assert TokenFile(tmp_path / "data").reader.fingerprint() != before
