"""Parquet and Arrow: the same rows from any cut, and mistakes by file, column and row."""

import json
import sys

import pytest

from megatron_hdp.data.formats import BadRecord, files_of, pieces_of, read

pyarrow = pytest.importorskip("pyarrow", reason="pip install 'megatron-hdp[data]'")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = [f"text {i} ä" * (i % 7) for i in range(1000)]
TABLE = pyarrow.table({"id": list(range(1000)), "text": TEXTS})


def write(path, table=TABLE, rows=300):
    name = str(path)
    if name.endswith(".parquet"):
        parquet.write_table(table, name, row_group_size=rows)
    else:
        opened = pyarrow.ipc.new_file if name.endswith(".feather") else pyarrow.ipc.new_stream
        with opened(name, table.schema) as stream:
            stream.write_table(table, max_chunksize=rows)
    return path


def records(path, key="text", piece_bytes=2**30):
    pieces = pieces_of(str(path), key, lines=False, piece_bytes=piece_bytes)
    return [record for piece in pieces for record in read(piece, key)]


def texts(path, **more):
    return [record.value.decode() for record in records(path, **more)]


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "x.feather"])
@pytest.mark.parametrize("piece_bytes", [1, 5_000, 2**30])
def test_cuts_anywhere_give_each_row_once(tmp_path, name, piece_bytes):
    path = write(tmp_path / name)
    found = records(path, piece_bytes=piece_bytes)
    assert [record.value.decode() for record in found] == TEXTS
    assert [record.where for record in found] == [f"{path}, row {i}" for i in range(1, 1001)]
    size = path.stat().st_size
    assert 0.9 * size <= sum(record.num_bytes for record in found) <= size
    pieces = pieces_of(str(path), "text", lines=False, piece_bytes=piece_bytes)
    assert len(pieces) == (4 if piece_bytes == 1 else len(pieces)) >= 1
    rows = records(path, None, piece_bytes)
    assert [row.value for row in rows] == TABLE.to_pylist()


@pytest.mark.parametrize("kind", [pyarrow.large_string(), pyarrow.binary(), pyarrow.large_binary()])
def test_columns_of_text(tmp_path, kind):
    table = pyarrow.table({"text": pyarrow.array([text.encode() for text in TEXTS]).cast(kind)})
    assert texts(write(tmp_path / "x.parquet", table)) == TEXTS


def test_a_column_with_a_dictionary_and_one_with_a_dot(tmp_path):
    column = pyarrow.array(["a", "b", "a"]).dictionary_encode()
    assert texts(write(tmp_path / "x.arrow", pyarrow.table({"text": column}))) == ["a", "b", "a"]
    dotted = write(tmp_path / "x.parquet", pyarrow.table({"a.b": ["x"], "a": ["y"]}))
    assert texts(dotted, key="a.b") == ["x"]


@pytest.mark.parametrize("name", ["x.arrow", "x.parquet"])
@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.binary()])
def test_text_that_is_no_utf8_is_bad(tmp_path, name, kind):
    column = pyarrow.array([b"a", b"a\xff"]).view(kind)
    good, bad = records(write(tmp_path / name, pyarrow.table({"text": column})))
    assert good.value == b"a" and isinstance(bad, BadRecord)
    assert f"{name}, row 2: found no UTF-8 (byte 1 is 0xff)" in bad.message


def test_null_is_bad(tmp_path):
    good, bad = records(write(tmp_path / "x.parquet", pyarrow.table({"text": ["a", None]})))
    assert isinstance(bad, BadRecord)
    assert bad.message.endswith("x.parquet, row 2: expected a string under 'text', found null")


def test_other_columns(tmp_path):
    path = write(tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="no column 'body', .*there are id, text: name one"):
        records(path, "body")
    with pytest.raises(ValueError, match="column 'id' holds int64, expected strings"):
        records(path, "id")


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "x.feather"])
def test_damaged_tables(tmp_path, name):
    path = write(tmp_path / name)
    raw = path.read_bytes()
    for damaged in (raw[: len(raw) // 2], b"", b"text that is no table at all"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{path} cannot be read as a table"):
            records(path)


def test_a_dataset_saved_to_disk(tmp_path):
    for i in range(2):
        part = TABLE.slice(500 * i, 500)
        write(tmp_path / f"data-0000{i}-of-00002.arrow", part)
    files = [{"filename": f"data-0000{i}-of-00002.arrow"} for i in range(2)]
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": files}))
    (tmp_path / "dataset_info.json").write_text("{}")
    found = [text for path in files_of(str(tmp_path), None) for text in texts(path)]
    assert found == TEXTS


def test_an_empty_table_has_no_records(tmp_path):
    for name in ("x.parquet", "x.arrow"):
        assert records(write(tmp_path / name, TABLE.slice(0, 0))) == []


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_the_extra_is_named(tmp_path, monkeypatch, name):
    path = write(tmp_path / name)
    for module in ("pyarrow", "pyarrow.parquet", "pyarrow.ipc"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=rf"{name}.*pip install 'megatron-hdp\[data\]'"):
        records(path)
