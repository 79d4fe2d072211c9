"""A source becomes a pair once, the same however it is made, and bad ones are counted."""

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hdp.data import prepare as room
from megatron_hdp.data.prepare import cache
from megatron_hdp.data.spec import SourceSpec
from tests.data.prepare.corpora import (
    as_bytes,
    documents,
    names,
    pair,
    run,
    spec_of,
    texts_of,
    write_lines,
)


@pytest.fixture
def corpus(tmp_path):
    """Three files of 60 documents, cut into a few shards."""
    folder = tmp_path / "source"
    for i in range(3):
        write_lines(folder / f"{i}.jsonl", texts_of(60, i))
    return folder


def texts():
    return [text for i in range(3) for text in texts_of(60, i)]


def test_the_pair_is_the_same_for_any_number_of_workers(corpus, tmp_path):
    found = {n: run(corpus, tmp_path / f"cache{n}", workers=n) for n in (0, 1, 2, 3)}
    for n, shard_bytes in (("one", None), ("many", 3000)):  # nor does the size of shards matter
        found[n] = run(corpus, tmp_path / n, shard_bytes=shard_bytes)
    whole, *others = (pair(one.prefix) for one in found.values())
    assert others == [whole] * 5
    assert documents(found[0].prefix) == as_bytes(texts())
    assert {(one.documents, one.tokens, one.bad) for one in found.values()} == {
        (180, sum(map(len, as_bytes(texts()))), 0)
    }
    key = Path(found[0].prefix).name
    assert key.startswith("web-") and len(key) == len("web-") + 16
    assert names(tmp_path / "cache2") == [
        f"{key}{end}" for end in (".bin", ".idx", ".json", ".lock", ".sums")
    ]


def test_it_is_made_once(corpus, tmp_path, monkeypatch):
    said = []
    first = run(corpus, tmp_path / "cache", said=said)
    assert len(said) == 2 and "prepares" in said[0] and "180 documents" in said[1]
    monkeypatch.setattr(cache, "run_tasks", lambda *rest: pytest.fail("it was made again"))
    monkeypatch.setattr(
        room.cache_key, "hash_of_file", lambda path: pytest.fail(f"{path} was read again")
    )
    assert run(corpus, tmp_path / "cache", said=said) == first
    assert len(said) == 2


def test_contents_count_and_neither_places_nor_times(corpus, tmp_path):
    first = run(corpus, tmp_path / "cache")
    os.rename(corpus, tmp_path / "elsewhere")
    said = []
    assert run(tmp_path / "elsewhere", tmp_path / "cache", said=said) == first
    os.utime(tmp_path / "elsewhere" / "0.jsonl", (1, 1))
    assert run(tmp_path / "elsewhere", tmp_path / "cache", said=said) == first
    assert said == []


@pytest.mark.parametrize("change", [{"append_eod": False}, {"key": "other"}, {"glob": "0.jsonl"}])
def test_whatever_changes_tokens_is_another_pair(corpus, tmp_path, change):
    for path in corpus.iterdir():
        rows = map(json.loads, path.read_text().splitlines())
        path.write_text("".join(json.dumps(row | {"other": "x"}) + "\n" for row in rows))
    first = run(corpus, tmp_path / "cache")
    assert run(corpus, tmp_path / "cache", **change).prefix != first.prefix


@pytest.mark.parametrize("what", ["tokenizer_identity", "FORMAT_VERSION"])
def test_another_tokenizer_or_version_is_another_pair(corpus, tmp_path, monkeypatch, what):
    first = run(corpus, tmp_path / "cache")
    other = {"tokenizer_identity": lambda name: "another", "FORMAT_VERSION": 0}[what]
    monkeypatch.setattr(room.cache_key, what, other)
    assert run(corpus, tmp_path / "cache").prefix != first.prefix


def test_a_changed_file_is_another_pair(corpus, tmp_path):
    first = run(corpus, tmp_path / "cache")
    write_lines(corpus / "1.jsonl", texts_of(60, 9))
    second = run(corpus, tmp_path / "cache")
    assert second.prefix != first.prefix
    assert documents(first.prefix) == as_bytes(texts())  # which another run may still read


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json", ".sums"])
def test_what_is_damaged_is_made_again(corpus, tmp_path, suffix):
    first = run(corpus, tmp_path / "cache")
    whole = pair(first.prefix)
    Path(first.prefix + suffix).write_bytes(b"")
    assert run(corpus, tmp_path / "cache") == first
    assert pair(first.prefix) == whole


def test_a_manifest_says_what_it_is_of(corpus, tmp_path):
    found = json.loads(Path(run(corpus, tmp_path / "cache").manifest).read_text())
    assert found["source"] == "web" and found["tokenizer_name"] == "byte"
    assert [Path(one["path"]).name for one in found["files"]] == ["0.jsonl", "1.jsonl", "2.jsonl"]
    assert found["counts"]["documents"] == 180


def test_a_source_with_a_name_for_no_file(corpus, tmp_path):
    prefix = run(corpus, tmp_path / "cache", name="a/b: c").prefix
    assert Path(prefix).parent == tmp_path / "cache"


def test_formats_may_stand_side_by_side(tmp_path):
    folder = tmp_path / "source"
    write_lines(folder / "a.jsonl", ["a"])
    (folder / "b.txt").write_text("b")
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "c"}'))
    (folder / "empty.txt").write_text("")
    found = run(folder, tmp_path / "cache")
    assert documents(found.prefix) == as_bytes(["a", "b", "c"])


def write_bad(path):
    path.write_text('{"text": "a"}\nbroken\n{"text": "b"}\n{"other": 1}\n' + '{"text": "c"}\n' * 6)
    return path


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_documents_are_counted(tmp_path, workers):
    path = write_bad(tmp_path / "x.jsonl")
    said = []
    options = {"said": said, "workers": workers, "shard_bytes": 30}
    found = run(path, tmp_path / "cache", bad_limit=0.2, **options)
    assert (found.documents, found.bad) == (8, 2)
    assert "2 bad ones left out, the first" in said[-1] and "x.jsonl, line 2: " in said[-1]
    assert run(path, tmp_path / "cache", bad_limit=0.2, **options) == found
    message = r"2 of 10 documents are bad \(20.000%\), expected at most .*line 2: .*; .*line 4: "
    for folder in ("cache", "another"):
        with pytest.raises(ValueError, match=message):
            run(path, tmp_path / folder, bad_limit=0.1)
    assert not list((tmp_path / "another").glob("*.bin"))
    assert run(path, tmp_path / "another", bad_limit=0.5).bad == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_no_document_may_be_bad_unless_it_is_said(tmp_path, workers):
    path = write_bad(tmp_path / "x.jsonl")
    with pytest.raises(ValueError, match=r"x.jsonl, line \d: expected"):
        run(path, tmp_path / "cache", workers=workers, shard_bytes=30)


def test_no_tokens_at_all(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", ["", ""])
    with pytest.raises(ValueError, match="none of 1 files has a token .2 empty documents."):
        run(path, tmp_path / "cache")


def test_a_pair_is_not_prepared(tmp_path):
    (tmp_path / "web.idx").write_bytes(b"")
    with pytest.raises(ValueError, match="is a .bin/.idx pair, expected text or conversations"):
        run(tmp_path / "web", tmp_path / "cache")


def test_a_file_that_is_written_meanwhile(corpus, tmp_path, monkeypatch):
    run_tasks = cache.run_tasks

    def append(*arguments):
        yield from run_tasks(*arguments)
        with open(corpus / "1.jsonl", "a") as stream:
            stream.write('{"text": "more"}\n')

    monkeypatch.setattr(cache, "run_tasks", append)
    with pytest.raises(ValueError, match="1.jsonl has changed while it was prepared"):
        run(corpus, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.bin"))
    monkeypatch.undo()
    assert run(corpus, tmp_path / "cache").documents == 181


def test_a_damaged_manifest_is_made_again(corpus, tmp_path):
    manifest = Path(run(corpus, tmp_path / "cache").manifest)
    raw = manifest.read_bytes()
    for damaged in (
        raw.replace(b'"empty"', b'"ampty"'),
        raw.replace(b"180", b"181"),
        raw[:-9],
        b"",
    ):
        manifest.write_bytes(damaged)
        assert run(corpus, tmp_path / "cache").documents == 180
        assert manifest.read_bytes() == raw


def test_sources_of_other_names_share_what_is_made(corpus, tmp_path):
    found = run(corpus, tmp_path / "cache")
    for name in ("other", "n" * 300, "ä" * 300):
        spec = replace(spec_of(corpus), name=name)
        again = room.prepare(
            spec, tokenizer="byte", folder=tmp_path / "cache", workers=0, say=pytest.fail
        )
        assert again.prefix == found.prefix


@pytest.mark.parametrize("name", ["n" * 300, "ä" * 300])
def test_a_long_name_is_cut(tmp_path, name):
    (tmp_path / "x.txt").write_text("a")
    spec = SourceSpec(name=name, path=str(tmp_path / "x.txt"))
    found = room.prepare(spec, tokenizer="byte", folder=tmp_path, workers=0, say=str)
    assert name.startswith(Path(found.prefix).name.rpartition("-")[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_folder_that_cannot_be_written(corpus, tmp_path, workers):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        run(corpus, tmp_path / "file" / "cache", workers=workers)


def test_the_default_is_to_speak_on_stderr(corpus, tmp_path, capsys):
    room.prepare(spec_of(corpus), tokenizer="byte", folder=tmp_path / "cache", workers=0)
    assert "megatron_hdp: source web: 180 documents" in capsys.readouterr().err
