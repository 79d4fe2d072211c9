"""Megatron's flags of data mean what they mean in Megatron."""

import json

import pytest
from megatron.core.datasets.utils import get_blend_from_list

from megatron_hdp.data.mixture import BlendFlags, specs_of_flags


def weights_of(spec):
    return spec.schedule.phases[0].weights


LISTS = ("a", "a b c", "a b", "0.3 a 0.7 b", "30 x/a 70 y/b", "1 2 3", "1e-9 a 5 b")


@pytest.mark.parametrize("words", map(str.split, LISTS))
def test_lists_are_read_as_megatron_reads_them(words):
    prefixes, weights = get_blend_from_list(words)
    spec = specs_of_flags(BlendFlags(data_path=words))["train"]
    assert [one.path for one in spec.sources] == prefixes
    found = weights_of(spec)
    assert (found and list(found.values())) == weights
    assert spec.weight_unit == "tokens"
    assert all(one.format == "tokens" for one in spec.sources)


def test_splits_of_one_list():
    specs = specs_of_flags(BlendFlags(data_path=["a"], split="90,5,5"))
    found = [(name, one.split, one.part) for name, one in specs.items()]
    assert found == [(one, "90,5,5", i) for i, one in enumerate(("train", "valid", "test"))]


def test_lists_in_files(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("0.3 a\n0.7   b\n")
    spec = specs_of_flags(BlendFlags(data_args_path=str(path)))["valid"]
    assert (list(weights_of(spec).values()), spec.part) == ([0.3, 0.7], 1)
    path.write_text(json.dumps({"train": ["1", "a", "2", "b"], "valid": "c", "test": None}))
    specs = specs_of_flags(BlendFlags(per_split_data_args_path=str(path)))
    assert set(specs) == {"train", "valid"}
    assert list(weights_of(specs["train"]).values()) == [1, 2]
    assert specs["valid"].sources[0].path == "c" and specs["valid"].split == "1"


def test_lists_of_splits():
    specs = specs_of_flags(BlendFlags(train_data_path=["a", "b", "c"], test_data_path=["d"]))
    assert set(specs) == {"train", "test"}
    assert [one.name for one in specs["train"].sources] == ["a", "b", "c"]


def test_names():
    paths = ["/x/web", "/x/code", "/y/code", "/x/web2", "/x/web2"]
    spec = specs_of_flags(BlendFlags(data_path=paths))["train"]
    names = [one.name for one in spec.sources]
    assert names == ["web", "/x/code", "/y/code", "/x/web2", "/x/web2#2"]


def test_conversations():
    flags = BlendFlags(data_path=["a.jsonl"], sft=True, sft_tokenizer_prompt_format="identity")
    spec = specs_of_flags(flags)["train"]
    assert spec.weight_unit == "sequences"
    assert (spec.sources[0].format, spec.sources[0].template) == ("chat", "megatron:identity")


MISTAKES = {
    "nothing": ({}, "found no flag that names data, expected one of --data-path"),
    "two": (
        {"data_path": ["a"], "train_data_path": ["b"]},
        "found --data-path and --train-data-path, --valid-data-path, --test-data-path, expected",
    ),
    "half-weights": ({"data_path": ["1", "a", "b", "c"]}, "found 'b' in the place of a weight"),
    "no-weight": ({"data_path": ["0", "a", "0", "b"]}, "at least one above 0"),
    "negative": ({"data_path": ["-1", "a", "2", "b"]}, "found the weights -1, 2"),
    "nan": ({"data_path": ["nan", "a", "2", "b"]}, "found the weights nan, 2"),
    "no-file": ({"data_args_path": "/none"}, "--data-args-path /none: No such file"),
}
FILES = [
    ("", "--data-args-path: found an empty list"),
    ("[1", "not valid JSON"),
    ('{"a": ["x"]}', "found other keys, expected an object with lists of words under train"),
    ('{"train": 3}', "train is '3', expected an object"),
    ('{"valid": ["x"]}', "found other keys"),
]


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(case):
    flags, message = MISTAKES[case]
    with pytest.raises(ValueError, match=message):
        specs_of_flags(BlendFlags(**flags))


@pytest.mark.parametrize(("text", "message"), FILES)
def test_mistakes_in_files(tmp_path, text, message):
    path = tmp_path / "list"
    path.write_text(text)
    flag = "data_args_path" if not text else "per_split_data_args_path"
    with pytest.raises(ValueError, match=message):
        specs_of_flags(BlendFlags(**{flag: str(path)}))
