"""JSON lines: the same records from any cut, plain or compressed, and mistakes by file and line."""

import gzip
import json
import os

import pytest

from megatron_hdp.data.formats import BadRecord, pieces_of, read

pyarrow = pytest.importorskip("pyarrow", reason="pip install 'megatron-hdp[data]'")


def records(path, key="text", *, lines=False, piece_bytes=2**30):
    pieces = pieces_of(str(path), key, lines=lines, piece_bytes=piece_bytes)
    return [record for piece in pieces for record in read(piece, key)]


def values(path, key="text", **more):
    return [record.value for record in records(path, key, **more)]


def write(path, raw):
    if path.name.endswith(".gz"):
        raw = gzip.compress(raw)
    if path.name.endswith(".zst"):
        raw = pyarrow.compress(raw, "zstd", asbytes=True)
    path.write_bytes(raw)
    return path


TEXTS = ["a", "", "ä\n", "b" * 50, "c"]
RAW = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)
NAMES = ["x.jsonl", "x.ndjson", "x.json", "x.JSONL", "x.jsonl.gz", "x.json.gz", "x.jsonl.zst"]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_json_lines(tmp_path, name):
    path = write(tmp_path / name, RAW)
    found = records(path)
    assert [record.value for record in found] == TEXTS
    assert [record.where for record in found] == [f"{path}, line {i}" for i in range(1, 6)]
    assert sum(record.num_bytes for record in found) <= path.stat().st_size
    assert values(path, None) == [{"text": text} for text in TEXTS]


@pytest.mark.parametrize("name", ["x.gz", "x.zst", "x", "x.txt"])
def test_any_name_where_lines_are_said(tmp_path, name):
    assert values(write(tmp_path / name, RAW), lines=True) == TEXTS


@pytest.mark.parametrize("piece_bytes", [*range(1, 40), 100, 1000])
@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\n\n \n"])
def test_cuts_anywhere_give_each_line_once(tmp_path, piece_bytes, ending):
    raw = RAW.replace(b"\n", ending)
    path = write(tmp_path / "x.jsonl", raw[: -len(ending)] if piece_bytes % 2 else raw)
    found = records(path, piece_bytes=piece_bytes)
    assert [record.value for record in found] == TEXTS
    whole = records(path)
    assert [record.where for record in found] == [record.where for record in whole]
    pieces = pieces_of(str(path), "text", lines=False, piece_bytes=piece_bytes)
    assert sum(piece.num_bytes for piece in pieces) == path.stat().st_size


def test_what_json_takes_and_orjson_does_not(tmp_path):
    lines = [
        b'\xef\xbb\xbf{"text": "mark"}',
        b'{"text": "number", "score": NaN, "other": "half \\ud800"}',
        b'{"text": "whole \\ud83d\\ude00"}',
    ]
    path = write(tmp_path / "x.jsonl", b"\n".join(lines))
    assert values(path) == ["mark", "number", "whole \U0001f600"]


@pytest.mark.parametrize("key", ["text", None])
def test_half_a_surrogate_pair_is_damage(tmp_path, key):
    path = write(tmp_path / "x.jsonl", b'{"text": "a"}\n{"text": "half \\uD83D."}\n')
    _, bad = records(path, key)
    assert isinstance(bad, BadRecord)
    assert bad.message.startswith(rf"{path}, line 2: found half a surrogate pair (\ud83d)")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"{broken", "expected one JSON object, found '{broken'"),
        (b'["text"]', "string under 'text', found"),
        (b'{"body": "x"}', "name the key"),
        (b'{"text": 5}', "string under 'text'"),
        (b"\xff", "expected one JSON object"),
        (b"[" * 100_000, "maximum recursion depth"),
    ],
)
def test_a_line_that_is_none_is_named_and_the_others_are_read(tmp_path, line, found):
    path = write(tmp_path / "x.jsonl", b'{"text": "a"}\n' + line + b'\n{"text": "b"}\n')
    for piece_bytes in (5, 2**30):
        good, bad, other = records(path, piece_bytes=piece_bytes)
        assert (good.value, other.value) == ("a", "b")
        assert isinstance(bad, BadRecord) and found in bad.message
        assert bad.message.startswith(f"{path}, line 2: ")


def test_rows_must_be_objects(tmp_path):
    good, bad = records(write(tmp_path / "x.jsonl", b'{"a": [1]}\n[1]\n'), None)
    assert good.value == {"a": [1]}
    assert bad.message.endswith("line 2: expected one JSON object, found '[1]'")


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst"])
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_file_says_after_which_line(tmp_path, name, damage):
    lines = b"".join(b'{"text": "%d"}\n' % (i * i) for i in range(100_000))
    path = write(tmp_path / name, lines)
    raw = bytearray(path.read_bytes())
    half = len(raw) // 2
    path.write_bytes(raw[:half] if damage == "cut" else raw[:half] + b"\0" * 99 + raw[half + 99 :])
    with pytest.raises(ValueError, match=rf"{path} cannot be decompressed after line \d+ .*copy"):
        records(path)


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst"])
def test_what_lies_before_a_damage_is_read(tmp_path, name):
    lines = [b'{"text": "%s"}\n' % os.urandom(1000).hex().encode() for _ in range(300)]
    path = write(tmp_path / name, b"".join(lines))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"after line [123]\d\d "):
        records(path)


def test_another_json_is_a_text(tmp_path):
    for raw in (b'{\n"text": "a"}', b"[1, 2]", b'{"body": "x"}', b"", b"\n\n"):
        assert values(write(tmp_path / "x.json", raw)) == [raw]


def test_lines_without_the_key_are_lines(tmp_path):
    found = records(write(tmp_path / "x.json", b'{"body": "x"}\n{"body": "y"}\n'))
    assert [bad.message.endswith("(--json-key, or key of a source)") for bad in found] == [True] * 2


@pytest.mark.parametrize("name", ["x.json", "x.jsonl", "x.json.gz", "x.jsonl.zst"])
@pytest.mark.parametrize(
    "raw",
    [
        b'[{"text": "a"}]',
        b'\n[\n {\n"text": "a"}]',
        b'\xef\xbb\xbf["a"]',
        b"[]",
        b'[\n["a"], []]\n',
    ],
)
@pytest.mark.parametrize("key", ["text", None])
def test_an_array_of_records_is_refused(tmp_path, name, raw, key):
    path = write(tmp_path / name, raw)
    with pytest.raises(ValueError, match=rf"{path} is one JSON array.*jq -c '.\[\]' .*/x.jsonl?"):
        records(path, key)


def test_zstd_names_the_extra(tmp_path, monkeypatch):
    import sys

    path = write(tmp_path / "x.jsonl.zst", RAW)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"x.jsonl.zst.*pip install 'megatron-hdp\[data\]"
    ):
        records(path)
