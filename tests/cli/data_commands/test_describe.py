"""``megatron-hdp data describe``: its figures against numpy on the same lengths, and its files."""

import json

import numpy as np
import pytest

from megatron_hdp.cli.data_commands import descriptions
from megatron_hdp.cli.main import main
from megatron_hdp.data.spans import Spans
from tests.support.sources import LENGTHS, data_file


def described(capsys, *arguments):
    assert main(["data", "describe", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["sources"]


@pytest.mark.parametrize("piece", [2, 1 << 20])
def test_figures_are_those_of_the_lengths(folder, capsys, monkeypatch, piece):
    monkeypatch.setattr(descriptions, "_PIECE", piece)
    found = described(capsys, data_file(folder))
    assert list(found) == ["web", "chat", "code"]
    for name, lengths in LENGTHS.items():
        one = found[name]
        assert one["documents"] == one["sequences"] == len(lengths)
        assert one["tokens"] == sum(lengths)
        assert one["lengths"]["p50"] == np.quantile(lengths, 0.5, method="higher")
        assert one["lengths"]["p99"] == one["lengths"]["longest"] == max(lengths)
        assert one["lengths"]["mean"] == pytest.approx(np.mean(lengths))
        assert sum(one["token_shares"].values()) == pytest.approx(1)
    assert found["web"]["loss_tokens"] == sum(LENGTHS["web"]) - len(LENGTHS["web"])
    trained = Spans(folder / "chat" / "corpus.spans").num_trained_tokens
    assert found["chat"]["loss_tokens"] == trained < sum(LENGTHS["chat"]) / 2 + 4 * 5
    assert found["web"]["token_shares"]["64"] == pytest.approx((64 + 41) / sum(LENGTHS["web"]))


def test_prefixes_and_parts(folder, capsys):
    web, code = folder / "web" / "corpus", folder / "code" / "corpus.idx"
    found = described(capsys, web, code, "--split", "3,1,0")
    assert {name: one["documents"] for name, one in found.items()} == {
        f"{web} train": 6,
        f"{web} valid": 2,
        f"{str(code)[:-4]} train": 3,
        f"{str(code)[:-4]} valid": 1,
    }
    assert found[f"{web} train"]["tokens"] == sum(LENGTHS["web"][:6])


@pytest.mark.parametrize(
    ("policy", "sequences"),
    [
        ("truncate", [50, 5, 50, 31]),
        ("split", [50, 50, 5, 50, 40, 31]),
        ("error", [50, 5, 50, 31]),
    ],
)
def test_a_context_length_cuts_as_the_source_says(folder, capsys, policy, sequences):
    path = data_file(folder, code=f"long-sequence: {policy}")
    found = described(capsys, path, "--max-length", 50)["code"]
    assert (found["documents"], found["cut"]) == (4, 2)
    assert (found["sequences"], found["tokens"]) == (len(sequences), sum(sequences))
    assert found["lengths"]["longest"] == 50


def test_tables_say_it(folder, capsys):
    assert main(["data", "describe", str(data_file(folder))]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["source", "documents", "tokens", "loss", "tokens"]
    assert lines[1] == ["web", "8", "181", "173"]
    assert lines[4][:3] == ["all", "17", "525"]
    assert lines[7] == ["web", *["3", "7", "7", "20", "41", "64", "64", "64", "22.6"]]
    assert lines[-2] == ["chat", "0.0%", "6.8%", "10.2%", "21.2%", "61.9%", "0.0%"]


def test_columns_that_say_nothing_are_left_out(folder, capsys):
    assert main(["data", "describe", str(folder / "web" / "corpus")]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["source", "documents", "tokens"]


def test_text_is_tokenised_first(folder, capsys):
    texts = ["a", "bcd" * 5]
    (folder / "t.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    found = described(capsys, folder / "t.jsonl", "--split", "1,1")
    assert {name: one["tokens"] for name, one in found.items()} == {
        "t.jsonl train": 2,
        "t.jsonl valid": 16,
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data.yaml", "web/corpus"], "found data.yaml among 2 names, expected one file"),
        (["gone.yaml"], "gone.yaml: No such file"),
        (["nothing/here"], "nothing/here: no such file or folder, expected one with documents"),
        (["web/corpus", "--split", "0,0"], "expected one to three weights"),
    ],
)
def test_mistakes_are_one_line(folder, capsys, monkeypatch, arguments, words):
    data_file(folder)
    monkeypatch.chdir(folder)
    assert main(["data", "describe", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-hdp data describe: error: ")
    assert words in line
