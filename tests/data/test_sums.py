"""The sums beside a pair: whichever byte is another one, nothing of it is trained on."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.data.index_file import TokenFileError
from megatron_hdp.data.mapped_file import DamagedFileError, FileKind
from megatron_hdp.data.mixture import Opening, open_corpus, read_data_file
from megatron_hdp.data.prepare import cache
from megatron_hdp.data.sums import BLOCK, write_sums
from megatron_hdp.data.tables import open_source
from megatron_hdp.data.token_writer import TokenWriter
from tests.data.prepare.corpora import as_bytes, conversation, documents, run, texts_of, write_lines


def opened(prefix, folder=None):
    return open_source(prefix, max_length=2**20, cache_folder=folder)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def flip(path, place, bit):
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1 << bit
    path.write_bytes(raw)


@pytest.fixture
def prefix(tmp_path):
    lengths = [5000, 1, 7, 2048, 3000, 9001]
    draw = np.random.default_rng(1)
    with TokenWriter(tmp_path / "pair", 50_000) as writer:
        for length in lengths:
            writer.add(draw.integers(0, 50_000, length))
    write_sums(tmp_path / "pair", durable=False)
    return tmp_path / "pair"


def test_stretches_are_read_as_without_sums(prefix):
    _, checked = opened(prefix)
    Path(f"{prefix}.sums").unlink()
    _, plain = opened(prefix)
    assert checked.sums is not None and plain.sums is None
    num_tokens = Path(f"{prefix}.bin").stat().st_size // 2
    draw = random.Random(2)
    stretches = [(0, 0), (0, num_tokens), (num_tokens, 0), (BLOCK // 2, BLOCK // 2)]
    for _ in range(100):
        begin = draw.randrange(num_tokens)
        stretches.append((begin, draw.randrange(num_tokens - begin)))
    for one in stretches:
        assert np.array_equal(checked.read(*one), plain.read(*one))


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".sums"])
@pytest.mark.parametrize("has_cache", [False, True])
def test_no_other_byte_gives_tokens(prefix, tmp_path, suffix, has_cache):
    path = Path(f"{prefix}{suffix}")
    draw = random.Random(3)
    places = range(4096 if suffix == ".sums" else 0, path.stat().st_size)  # zeros fill a page
    for place in draw.sample(places, min(60, len(places))):
        flip(path, place, bit := draw.randrange(8))
        with pytest.raises(TokenFileError, match=r"pair\.(bin|idx|sums)"):
            table, reader = opened(prefix, tmp_path / "tables" if has_cache else None)
            reader.read(0, table.facts.num_tokens)
        flip(path, place, bit)
    opened(prefix)


def test_only_what_is_damaged_is_refused(prefix):
    flip(Path(f"{prefix}.bin"), 5 * BLOCK + 17, 3)
    _, reader = opened(prefix)
    reader.read(0, 5 * BLOCK // 2)
    for place in (5 * BLOCK, 6 * BLOCK - 2):
        with pytest.raises(TokenFileError, match=rf"from {5 * BLOCK:,} on: .*remove"):
            reader.read(place // 2, 1)


@pytest.mark.parametrize("place", [4096, 4096 + 12_345, 200_000, 399_999])
def test_every_byte_of_a_mapped_file_counts(tmp_path, place):
    kind = FileKind(b"HDPTHING", 1)
    with (tmp_path / "x").open("w+b") as file:
        file.truncate(400_000)
        kind.describe(file.fileno(), {})
    flip(tmp_path / "x", place, 5)
    with (tmp_path / "x").open("rb") as file, pytest.raises(DamagedFileError, match="other bytes"):
        kind.map(file.fileno(), lambda about: 400_000)


def test_a_prepared_source_has_sums(tmp_path):
    pytest.importorskip("jinja2", reason="pip install 'megatron-hdp[data]'")
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}"
    (tmp_path / "t.jinja").write_text(template + "{% endfor %}")
    write_rows(tmp_path / "x.jsonl", [conversation(number) for number in range(40)])
    keys = "path: x.jsonl, format: chat, template: t.jinja"
    (tmp_path / "d.yaml").write_text(f"sources: {{c: {{{keys}}}}}")
    spec = read_data_file(tmp_path / "d.yaml").training
    opening = Opening(max_length=256, long_sequence="truncate", tokenizer="byte", workers=0)
    open_corpus(spec, opening)
    for suffix in (".idx", ".spans"):
        (path,) = (tmp_path / "hdp-cache").glob(f"*{suffix}")
        for place in range(24, path.stat().st_size, 97):
            flip(path, place, 0)
            with pytest.raises(TokenFileError, match=rf"\{suffix}"):
                open_corpus(spec, opening)
            flip(path, place, 0)


def test_a_finished_shard_that_is_damaged_is_made_again(tmp_path, monkeypatch):
    source = write_lines(tmp_path / "x.jsonl", texts := texts_of(100))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(cache, "join", lambda *rest: (_ for _ in ()).throw(KeyboardInterrupt))
        run(source, tmp_path / "cache")
    shards = sorted((tmp_path / "cache").glob("*.work/*.bin"))
    flip(shards[1], 40, 2)
    said = []
    made = run(source, tmp_path / "cache", said=said)
    assert f"1 of {len(shards)} shards" in said[0]
    assert documents(made.prefix) == as_bytes(texts)
