"""``megatron-hdp data prepare``: a run after it finds everything."""

import json
from pathlib import Path

import pytest

from megatron_hdp.cli.main import main
from megatron_hdp.data.mixture import Opening, open_corpus, read_data_file
from tests.support.sources import data_file, write_sources

TEXTS = ["one", "two and three", "", "four" * 20]


@pytest.fixture
def path(tmp_path):
    """One pair and two sources of text."""
    write_sources(tmp_path, ["web"])
    lines = "\n".join(json.dumps({"text": text}) for text in TEXTS)
    (tmp_path / "lines.jsonl").write_text(lines)
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]}
    bad = {"messages": [{"role": "assistant"}]}
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, [chat, chat, bad])))
    more = "  lines: {path: lines.jsonl}\n  chat: {path: chat.jsonl, format: chat, bad-limit: 0.5}"
    return data_file(tmp_path, more, names=["web"])


def snapshot(folder):
    return {file: file.stat().st_mtime_ns for file in Path(folder).rglob("*") if file.is_file()}


def run(*arguments):
    return main(["data", "prepare", *map(str, arguments)])


@pytest.mark.parametrize("cache", [None, "elsewhere"])
def test_a_run_after_it_does_not_tokenise(path, tmp_path, capsys, cache):
    folder = tmp_path / (cache or "hdp-cache")
    flags = [] if cache is None else ["--data-cache-path", folder]
    assert run(path, "--workers", 1, *flags) == 0
    printed = capsys.readouterr()
    assert "prepares" in printed.err
    before = {file: at for file, at in snapshot(folder).items() if file.suffix != ".lock"}
    said = []
    opening = Opening(
        max_length=512,
        long_sequence="error",
        tokenizer="byte",
        cache_folder=None if cache is None else folder,
        say=said.append,
    )
    corpus = open_corpus(read_data_file(path).training, opening)
    assert [one for one in said if "prepare" in one] == []
    assert before.items() <= snapshot(folder).items()
    for source in corpus.sources[1:]:
        assert Path(source.prefix).parent == folder
    rows = {line.split()[0]: line.split() for line in printed.out.splitlines()[1:4]}
    for source in corpus.sources:
        facts = source.table.facts
        figures = [f"{n:,}" for n in (facts.num_documents, facts.num_tokens, source.bad)]
        assert rows[source.name][1:] == [*figures, source.prefix]
    assert rows["chat"][1:4:2] == ["2", "1"]
    assert "web: a .bin/.idx pair already, checked" in printed.out
    manifests = [line.split()[-1] for line in printed.out.splitlines() if "manifest" in line]
    assert [json.loads(Path(one).read_text())["source"] for one in manifests] == ["lines", "chat"]


def test_a_second_time_changes_nothing(path, tmp_path, capsys):
    assert run(path, "--workers", 1) == 0
    first, before = capsys.readouterr().out, snapshot(tmp_path)
    assert run(path, "--workers", 1) == 0
    second = capsys.readouterr()
    assert (second.out, snapshot(tmp_path)) == (first, before)
    assert "prepares" not in second.err


def test_what_lies_below_is_named_from_here_on(path, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(path.name, "--workers", 1) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("  web/corpus")
    assert lines[-2].startswith("  lines: manifest hdp-cache/lines-")


def test_another_tokenizer_is_another_cache(path, tmp_path, capsys):
    assert run(path, "--tokenizer", "nonsense") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-hdp data prepare: error: ")
    assert "nonsense" in line


def cut(path):
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: cut(folder / "web" / "corpus.bin"), "corpus.bin"),
        (lambda folder: cut(folder / "web" / "corpus.idx"), "corpus.idx"),
        (
            lambda folder: (folder / "chat/corpus.spans").rename(folder / "web/corpus.spans"),
            "corpus.spans is of 5 documents, the .idx beside it has 8",
        ),
    ],
)
def test_a_pair_is_checked(folder, capsys, damage, words):
    path = data_file(folder, "", names=["web"])
    assert run(path) == 0
    capsys.readouterr()
    damage(folder)
    assert run(path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
