"""A folder that Energon prepared stands for the tars of its split for training."""

import json

import pytest

from megatron_hdp.data.formats.files import files_of

SPLITS = """
exclude: [shards/part-09.tar]
split_parts:
  train: ["shards/part-{08..10}.tar", b.tar]
  val: [a.tar]
  test: []
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / ".nv-meta").mkdir()
    for name in ("a", "b", "shards/part-08", "shards/part-09", "shards/part-10", "other"):
        (tmp_path / f"{name}.tar").touch()
        (tmp_path / f"{name}.tar.idx").touch()
    (tmp_path / ".nv-meta" / "split.yaml").write_text(SPLITS)
    return tmp_path


def names(folder, glob=None):
    return [path.removeprefix(f"{folder}/") for path in files_of(str(folder), glob)]


def test_the_tars_of_training_in_their_order(folder):
    assert names(folder) == ["shards/part-08.tar", "shards/part-10.tar", "b.tar"]
    assert names(folder, "*.tar")[:3] == ["a.tar", "b.tar", "other.tar"]


def test_splits_as_json(folder):
    (folder / ".nv-meta" / "split.yaml").unlink()
    text = json.dumps({"split_parts": {"train": ["b.tar"]}})
    (folder / ".nv-meta" / "split.json").write_text(text)
    assert names(folder) == ["b.tar"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "found neither split.yaml nor split.json"),
        ("split_parts: {val: [a.tar]}", "found no tars of a split train"),
        ("split_parts: {train: [7]}", "a name is no text"),
        ("[", "found no tars of a split train"),
        ("split_parts: {train: []}", "found no tar of the split train, expected one or more"),
        ("split_parts: {train: [c.tar]}", "c.tar: no such file, expected what"),
        ("{exclude: [a.tar/17], split_parts: {train: [a.tar]}}", "found samples that are left out"),
    ],
)
def test_one_that_is_none(folder, text, why):
    path = folder / ".nv-meta" / "split.yaml"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ValueError, match=why):
        names(folder)
