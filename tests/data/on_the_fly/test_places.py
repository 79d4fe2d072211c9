"""Where the records of files begin: found once, kept whole or not at all, read by number."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.data.formats import BadRecord, pieces_of, read
from megatron_hdp.data.formats import lines as lines_format
from megatron_hdp.data.on_the_fly import RecordIndex, SourceFiles, places
from megatron_hdp.data.spec import SourceSpec
from tests.data.prepare.corpora import texts_of, write_lines

LINES = st.lists(st.sampled_from(["", " ", "\t\r", "a", " b", "\r", "{}", "x" * 5000]))


def index_of(path, folder, said=None, **keys):
    said = [] if said is None else said
    files = SourceFiles.of(SourceSpec(name="web", path=str(path), **keys))
    return RecordIndex.open("web", files, Path(folder), said.append)


def values(index, rows=None):
    rows = np.arange(len(index)) if rows is None else np.array(rows)
    return [
        record.message if isinstance(record, BadRecord) else record.value
        for _, record in index.read(rows)
    ]


def prepared(path):
    """What preparing reads."""
    (piece,) = pieces_of(str(path), "text", lines=False, piece_bytes=2**40)
    return [
        record.message if isinstance(record, BadRecord) else record.value
        for record in read(piece, "text")
    ]


@given(LINES, st.booleans(), st.integers(1, 9))
@settings(max_examples=60)
def test_lines_that_are_not_blank(tmp_path_factory, lines, ends, block):
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    path.write_text("\n".join(lines) + ("\n" if ends else ""), newline="")
    before, lines_format._BLOCK_BYTES = lines_format._BLOCK_BYTES, block
    try:
        found = np.concatenate([[], *lines_format.line_begins(str(path), lambda _: None)])
    finally:
        lines_format._BLOCK_BYTES = before
    raw = path.read_bytes().splitlines(keepends=True) if "\r" not in "".join(lines) else None
    expected, at = [], 0
    for line in raw if raw is not None else path.read_bytes().split(b"\n"):
        size = len(line) + (raw is None)
        expected += [] if not line or line.isspace() else [at]
        at += size
    assert found.tolist() == expected


def test_records_are_those_that_preparing_reads(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", texts_of(50))
    with path.open("a") as stream:
        stream.write('\n \n{"text": 3}\n\n{"no": "text"}\n{"text": "last"}')
    index = index_of(tmp_path, tmp_path / "cache")
    assert len(index) == 53 and values(index) == prepared(path)
    assert values(index, [2, 51, 52]) == [prepared(path)[i] for i in (2, 51, 52)]
    assert index.where(51) == f"{path}, line 55"
    assert "line 55: expected a JSON object with a string under 'text'" in values(index, [51])[0]


def test_files_of_text_are_a_record_each(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name, text in {"a.txt": "one", "b.txt": "", "deep/c.txt": "three"}.items():
        (tmp_path / "in" / name).write_text(text)
    index = index_of(tmp_path / "in", tmp_path / "cache", glob="*.txt")
    assert values(index) == [b"one", b"", b"three"] and index.num_bytes == 0
    assert index.where(2) == str(tmp_path / "in" / "deep" / "c.txt")
    assert not (tmp_path / "cache").exists()


def test_places_are_found_once(tmp_path):
    path = write_lines(tmp_path / "in" / "x.jsonl", texts_of(30))
    said = []
    index = index_of(path, tmp_path / "cache", said)
    assert said == [f"source web: finding the records of 1 files, {path.stat().st_size:,} bytes"]
    assert values(index_of(path, tmp_path / "cache", said)) == values(index)
    assert len(said) == 1
    write_lines(tmp_path / "in" / "y.jsonl", texts_of(3))
    assert len(index_of(tmp_path / "in", tmp_path / "cache", said)) == 33
    assert said[1].startswith("source web: finding the records of 1 files")


@pytest.mark.parametrize("damage", ["head", "column", "short", "version"])
def test_damaged_places_are_found_again(tmp_path, damage, monkeypatch):
    path = write_lines(tmp_path / "x.jsonl", texts_of(30))
    expected = values(index_of(path, tmp_path / "cache"))
    (kept,) = (tmp_path / "cache").glob("*.places")
    raw = bytearray(kept.read_bytes())
    if damage == "short":
        raw = raw[:-4]
    elif damage == "version":
        raw[8] += 1
    else:
        raw[30 if damage == "head" else -3] ^= 1
    kept.write_bytes(raw)
    assert places.read_places(kept) is None
    said = []
    assert values(index_of(path, tmp_path / "cache", said)) == expected and len(said) == 1
    assert places.read_places(kept) is not None


def test_nothing_half_is_left(tmp_path, monkeypatch):
    """The file changes while its records are looked for."""
    path = write_lines(tmp_path / "x.jsonl", texts_of(30))
    begins = lines_format.line_begins

    def grown(*arguments):
        yield from begins(*arguments)
        with path.open("a") as stream:
            stream.write("\n")

    monkeypatch.setattr(lines_format, "line_begins", grown)
    with pytest.raises(ValueError, match=r"x\.jsonl has changed while the run read it"):
        index_of(path, tmp_path / "cache")
    assert [one.suffix for one in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.parametrize("change", ["grown", "rewritten", "gone"])
@pytest.mark.parametrize("name", ["x.jsonl", "x.txt", "x.parquet"])
def test_a_file_that_changes_is_named(tmp_path, change, name):
    path = tmp_path / "in" / name
    if name == "x.parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="pip install 'megatron-hdp[data]'")
        from pyarrow import parquet

        path.parent.mkdir()
        parquet.write_table(pyarrow.table({"text": texts_of(9)}), path)
    else:
        write_lines(path, texts_of(9))
    index = index_of(path, tmp_path / "cache")
    assert values(index)
    if change == "gone":
        path.unlink()
    else:
        raw = path.read_bytes()
        path.write_bytes(raw + b"x" if change == "grown" else raw[::-1])
        os.utime(path, ns=(1, 1))
    words = {
        "gone": "is gone, expected the",
        "grown": r"has changed while the run read it \([\d,]+ bytes before, [\d,]+ now\)",
    }.get(
        change, r"has changed while .* \([\d,]+ bytes as before, but written 1970-01-01 .*, not 20"
    )
    with pytest.raises(ValueError, match=rf"{name} {words}"):
        values(index)


def test_what_is_no_text_is_refused_at_once(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"\0\1\2")
    with pytest.raises(ValueError, match="is binary"):
        index_of(tmp_path / "x.jsonl", tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.places*"))
