"""The sample that sizes are estimated from is decoded once, and found where nothing changed."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from megatron_hdp import files
from megatron_hdp.data.mixture import Opening, open_corpus, read_data_file
from megatron_hdp.data.on_the_fly import Decoder, estimate, open_estimate
from tests.data.prepare.corpora import texts_of, write_lines

OPENING = Opening(
    max_length=100, long_sequence="truncate", tokenizer="byte", cache_folder=None, workers=0
)


@pytest.fixture
def folder(tmp_path):
    write_lines(tmp_path / "web" / "a.jsonl", texts_of(90, seed=1, longest=140))
    write_lines(tmp_path / "web" / "b.jsonl", texts_of(400, seed=2))
    return tmp_path


@pytest.fixture
def decoded(monkeypatch):
    """Numbers of the records that were decoded, by call."""
    calls = []
    real = Decoder._decoded

    def noting(self, rows, counts):
        calls.append(rows.tolist())
        return real(self, rows, counts)

    monkeypatch.setattr(Decoder, "_decoded", noting)
    return calls


def opened(folder, keys="", **opening):
    path = folder / "data.yaml"
    path.write_text(f"sources:\n  web: {{path: web, tokenise: on-the-fly{keys}}}\n")
    (source,) = open_corpus(read_data_file(path).training, replace(OPENING, **opening)).sources
    return source


def files_of(folder):
    return sorted((folder / "hdp-cache").glob("estimate-*.json"))


def test_the_second_process_decodes_nothing(folder, decoded):
    first = opened(folder)
    (sample,) = decoded
    assert len(sample) == 256 == first.estimate.num_sampled
    again = opened(folder)
    assert decoded == [sample]
    assert again.estimate == first.estimate and again.size("tokens") == first.size("tokens")
    lengths = [len(one.tokens) for one in first.decoder.rows(estimate._sample(490))]
    assert first.estimate.num_tokens == sum(lengths)


@pytest.mark.parametrize("what", ["text", "length", "key", "end"])
def test_what_it_depends_on_makes_another(folder, decoded, what):
    before = opened(folder)
    keys, opening = "", {}
    if what == "text":
        path = folder / "web" / "a.jsonl"
        path.write_text(path.read_text().replace("a", "b"))  # as many bytes
        os.utime(path, ns=(0, time.time_ns() + 10**9))
    elif what == "length":
        opening["max_length"] = 9
    elif what == "end":
        keys = ", append-eod: false"
    else:
        keys = ", key: title"
        for path in (folder / "web").iterdir():
            path.write_text(path.read_text().replace('"text"', '"title"'))
    after = opened(folder, keys, **opening)
    assert len(decoded) == 2 and len(files_of(folder)) == 2
    if what in ("length", "end"):
        assert after.estimate.num_tokens < before.estimate.num_tokens


@pytest.mark.parametrize("how", ["cut", "other", "list", "number"])
def test_a_damaged_file_is_made_again(folder, decoded, how):
    expected = opened(folder).estimate
    (path,) = files_of(folder)
    whole = path.read_bytes()
    damaged = {
        "cut": whole[:40],
        "other": whole.replace(b'"num_sampled": 256', b'"num_sampled": 255'),
        "list": b"[]",
        "number": whole.replace(str(expected.num_tokens).encode(), b"7"),
    }
    assert damaged[how] != whole
    path.write_bytes(damaged[how])
    assert opened(folder).estimate == expected
    assert len(decoded) == 2 and path.read_bytes() == whole


def test_of_several_at_a_time_one_decodes(folder, decoded):
    """Each has a lock of its own open, as processes have."""
    begin = threading.Barrier(4)

    opened(folder)  # makes the file that says where the records lie
    files_of(folder)[0].unlink()
    del decoded[:]
    spec = read_data_file(folder / "data.yaml").training

    def open_one():
        begin.wait(240)
        return open_corpus(spec, OPENING).sources[0].estimate

    with ThreadPoolExecutor(4) as pool:
        found = [one.result(60) for one in [pool.submit(open_one) for _ in range(4)]]
    assert len(decoded) == 1 and len(set(found)) == 1


def test_where_it_cannot_be_kept_each_decodes_it_and_says_so(folder, decoded):
    source = opened(folder)
    (folder / "file").touch()
    said = []
    place = {"folder": folder / "file" / "below", "say": said.append}
    options = {"recipe": source.recipe, "max_length": 100, **place}
    found = open_estimate("web", source.index, source.decoder, **options)
    assert found == source.estimate and len(decoded) == 2
    (line,) = said
    assert "source web: found no place for the estimate" in line and "256 records" in line
    assert "--data-cache-path" in line


def test_a_full_disk_leaves_nothing_half(folder, decoded, monkeypatch):
    def full(path):
        if "estimate-" in path:
            raise OSError(28, "No space left on device", path)

    said = []
    monkeypatch.setattr(files, "sync", full)
    found = opened(folder, say=said.append).estimate
    assert len(decoded) == 1 and found.num_sampled == 256
    assert any("No space left" in line for line in said)
    assert [one.name for one in (folder / "hdp-cache").glob("estimate-*")] == [
        f"{one.stem}.lock" for one in (folder / "hdp-cache").glob("estimate-*.lock")
    ]
