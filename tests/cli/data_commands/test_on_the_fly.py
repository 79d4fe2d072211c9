"""Commands over sources that are tokenised on the fly: they plan, estimate, or say why not."""

import json

import pytest

from megatron_hdp.cli.main import main
from tests.data.prepare.corpora import texts_of, write_lines
from tests.support.sources import data_file, write_sources

TEXTS = texts_of(5000, seed=1, longest=60)


@pytest.fixture
def path(tmp_path):
    write_sources(tmp_path, ["web"])
    write_lines(tmp_path / "text.jsonl", TEXTS)
    more = "  text: {path: text.jsonl, tokenise: on-the-fly}"
    return data_file(tmp_path, more, names=["web"])


def run(*arguments):
    return main(["data", *map(str, arguments)])


def test_describe_estimates(path, capsys):
    assert run("describe", path, "--json") == 0
    found = json.loads(capsys.readouterr().out)["sources"]
    tokens = sum(len(text.encode()) + 1 for text in TEXTS)
    assert found["web"]["sampled"] is None
    assert found["text"]["sampled"] == [4096, 5000]
    assert found["text"]["documents"] == 5000 - found["text"]["empty"]
    assert 0 <= found["text"]["empty"] < 200
    assert found["text"]["tokens"] == pytest.approx(tokens, rel=0.03)
    assert found["text"]["tokens"] != tokens
    assert run("describe", path) == 0
    assert "  text: estimates, from 4,096 of 5,000 records" in capsys.readouterr().out
    assert run("describe", path, "--split", "9,1,0") == 2
    assert "found --split for source 'text', which is tokenised" in capsys.readouterr().err


def test_plan_draws_what_a_run_draws(path, capsys):
    flags = ("--steps", 5, "--global-batch-size", 8)
    assert run("plan", path, *flags) == 2
    assert "found no --seq-length, and source 'text' is tokenised" in capsys.readouterr().err
    output = path.parent / "plan.json"
    assert run("plan", path, *flags, "--seq-length", 128, "--output", output) == 0
    found = json.loads(output.read_text())
    assert found["sequences"] == 40
    kept = (path.parent / "hdp-cache").glob("*.places")
    assert found["index_bytes"] - found["private_index_bytes"] == sum(
        one.stat().st_size for one in kept
    )


def test_prepare_leaves_them_alone(path, capsys):
    assert run("prepare", path) == 0
    assert "  text: tokenised on the fly, nothing to prepare" in capsys.readouterr().out
    assert not (path.parent / "hdp-cache").exists()
