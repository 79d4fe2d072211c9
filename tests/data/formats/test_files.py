"""Which files a path stands for, in which order, and what is said where there is none."""

import json

import pytest

from megatron_hdp.data.formats import files_below, files_of, kind_of
from megatron_hdp.data.spec import SourceSpec


@pytest.fixture
def folder(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/y.md", "c.txt"):
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "source"


def names(files, folder):
    return [path.removeprefix(f"{folder}/") for path in files]


def test_a_folder_is_walked_in_sorted_order(folder):
    assert names(files_of(str(folder), None), folder) == ["b.txt", "c.txt", "a/y.md", "a/z.txt"]
    assert names(files_of(str(folder), "*.txt"), folder) == ["b.txt", "c.txt", "a/z.txt"]


def test_a_file_and_a_pattern(folder):
    assert files_of(f"{folder}/b.txt", None) == [f"{folder}/b.txt"]
    assert names(files_of(f"{folder}/*.txt", None), folder) == ["b.txt", "c.txt"]
    assert names(files_of(f"{folder}/**/*.txt", None), folder) == ["a/z.txt", "b.txt", "c.txt"]
    (folder / "odd[1].txt").write_text("x")
    assert names(files_of(f"{folder}/odd[1].txt", None), folder) == ["odd[1].txt"]


@pytest.mark.parametrize(
    ("path", "glob", "expected"),
    [
        ("absent", None, "absent: no such file or folder, expected one with documents"),
        ("", "*.rs", r"no file whose name matches the glob '\*.rs', expected one or more"),
        ("*.rs", None, r"\*.rs: no file whose name matches it"),
    ],
)
def test_nothing_is_found(folder, path, glob, expected):
    with pytest.raises(ValueError, match=expected):
        files_of(str(folder / path), glob)


def saved_dataset(folder, names):
    folder.mkdir(parents=True)
    (folder / "dataset_info.json").write_text("{}")
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))
    for name in names:
        (folder / name).write_bytes(b"")


def test_a_saved_dataset_has_an_order_of_its_own(tmp_path):
    order = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    saved_dataset(tmp_path / "set", order)
    assert names(files_of(str(tmp_path / "set"), None), tmp_path / "set") == order
    assert names(files_of(str(tmp_path / "set"), "*.arrow"), tmp_path / "set") == sorted(order)
    (tmp_path / "set" / order[0]).unlink()
    with pytest.raises(ValueError, match="data-00001-of-00002.arrow: no such file, expected what"):
        files_of(str(tmp_path / "set"), None)
    (tmp_path / "set" / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="names no files under _data_files"):
        files_below(str(tmp_path / "set"), None)
    (tmp_path / "set" / "state.json").write_text("{")
    with pytest.raises(ValueError, match="state.json is no JSON"):
        files_below(str(tmp_path / "set"), None)


def test_of_several_splits_one_must_be_named(tmp_path):
    saved_dataset(tmp_path / "train", ["data.arrow"])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(
        ValueError, match=r"\['train', 'test'\], expected one of them: give .*/train"
    ):
        files_of(str(tmp_path), None)
    assert files_of(str(tmp_path / "train"), None) == [str(tmp_path / "train" / "data.arrow")]


def test_kinds(tmp_path):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"web{suffix}").write_bytes(b"")

    def kind(path, **more):
        return kind_of(SourceSpec(name="web", path=str(tmp_path / path), **more))

    assert kind("web") == "tokens"
    assert kind("other") == kind("web.jsonl") == "text"
    assert kind("web", format="chat") == "chat"
    with pytest.raises(ValueError, match="one file of a .bin/.idx pair.* give .*/web$"):
        kind("web.bin")
