"""Tars of WebDataset: rows of members with one name, pictures by their places."""

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from megatron_hdp.data.formats import BadRecord, Record, pieces_of, read


def write(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, raw in members:
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    return path


def rows_of(path: Path) -> list[Any]:
    (piece,) = pieces_of(str(path), None, lines=False, piece_bytes=10)
    return list(read(piece, None))


def test_members_of_one_name_are_a_row(tmp_path: Path) -> None:
    members = [
        ("a/1.jpg", b"one"),
        ("a/1.json", b'{"image": "1.jpg", "messages": []}'),
        ("a/2.first.png", b"two"),
        ("a/2.second.PNG", b"three"),
        ("a/2.cls", b"7"),
        ("a/2.txt", "ä caption".encode()),
        ("b/2.txt", b"no picture"),
        ("b/3.json", b"{"),
    ]
    path = write(tmp_path / "x.tar", members)
    first, second, third, bad = rows_of(path)
    assert all(isinstance(one, Record) for one in (first, second, third))
    assert first.value["messages"] == [] and "image" not in first.value
    raw = path.read_bytes()
    found = [one for row in (first, second) for one in row.value["images"]]
    parts = [raw[one["offset"] : one["offset"] + one["size"]] for one in found]
    assert parts == [b"one", b"two", b"three"]
    assert second.value["txt"] == "ä caption" and third.value == {"txt": "no picture"}
    assert isinstance(bad, BadRecord) and "row 4: b/3.json is no json" in bad.message
    assert sum(one.num_bytes for one in (first, second, third, bad)) == 2 * 512 * len(members)


@pytest.mark.parametrize("cut", [b"", b"no tar at all" * 100])
def test_what_is_no_tar_is_refused(tmp_path: Path, cut: bytes) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(cut)
    with pytest.raises(ValueError, match="cannot be read as a tar"):
        rows_of(path)


def test_a_tar_that_is_cut_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar", [("1.txt", b"a" * 2000), ("2.txt", b"b" * 2000)])
    path.write_bytes(path.read_bytes()[:4200])
    with pytest.raises(ValueError, match="cannot be read as a tar"):
        rows_of(path)


@pytest.mark.parametrize("name", ["x.tar.gz", "x.tgz", "x.tar.zst"])
def test_a_compressed_tar_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x1f\x8b")
    with pytest.raises(ValueError, match="unpack it"):
        rows_of(tmp_path / name)
