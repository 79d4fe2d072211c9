"""Files of text are one document each, as they lie on disk; other files are no text."""

import gzip

import pytest

from megatron_hdp.data.formats import pieces_of, read


def records(path):
    return [
        record
        for piece in pieces_of(str(path), "text", lines=False, piece_bytes=4)
        for record in read(piece, "text")
    ]


@pytest.mark.parametrize("raw", [b"", b"text\n", "ä".encode(), b"long " * 10])
def test_a_file_is_a_document(tmp_path, raw):
    path = tmp_path / "x.txt"
    path.write_bytes(raw)
    (record,) = records(path)
    assert (record.value, record.num_bytes, record.where) == (raw, len(raw), str(path))


def test_text_that_is_no_utf8_is_bad(tmp_path):
    (tmp_path / "x.txt").write_bytes("ä".encode("latin-1"))
    (bad,) = records(tmp_path / "x.txt")
    assert bad.message.startswith(f"{tmp_path}/x.txt: found no UTF-8 (byte 0 is 0xe4)")


def test_a_compressed_text_may_be_lines(tmp_path):
    path = tmp_path / "x.txt.gz"
    path.write_bytes(gzip.compress(b"text"))
    with pytest.raises(ValueError, match=r"compressed \(gzip\).*or call it NAME.jsonl.gz.*a glob"):
        records(path)


def test_a_binary_file(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"a\0")
    with pytest.raises(ValueError, match=r"is binary \(byte 1 is zero\)"):
        records(path)
