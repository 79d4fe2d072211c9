"""Sources with pictures: lengths count rows, no row ends within one, limits decide lengths."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from megatron_hdp.data import TokenFile
from megatron_hdp.data.index_file import Documents
from megatron_hdp.data.media import ITEM, Items, MediaFiles, PictureSettings
from megatron_hdp.data.mixture import (
    BatchSize,
    MediaRows,
    MediaSource,
    MixtureSpec,
    Opening,
    Phase,
    Position,
    Schedule,
    open_corpus,
    read_data_file,
)
from megatron_hdp.data.spans import Spans
from megatron_hdp.data.spec import MediaSpec, SourceSpec
from megatron_hdp.data.steps import StepPlanner, items_apart, plan_by
from tests.data.media import sources
from tests.data.media.sources import llava
from tests.support.thread_plane import plan_settings

pytest.importorskip("jinja2", reason="pip install 'megatron-hdp[data]'")
pytest.importorskip("transformers", reason="pip install 'megatron-hdp[tokenizers]'")

MEDIA = MediaSpec(encoder="qwen3-vl", least_pixels=1, most_pixels=40_000)
ROWS = [llava("<image> what?<image>", [i % 4, (i + 1) % 4], "it is " + "a" * i) for i in range(9)]
ROWS += [llava("no picture?", [], "none")]


def rows_of(documents: list[list[tuple[int, int]]]) -> MediaRows:
    """Pictures by document: the token and the rows of each."""
    flat = [one for document in documents for one in document]
    records = np.zeros(len(flat), dtype=ITEM)
    records["token"] = [token for token, _ in flat]
    first = np.cumsum([0, *map(len, documents)])
    items = Items(first, records, "", np.zeros(0, dtype=np.int64), memoryview(b""))
    files = MediaFiles(".", PictureSettings.of(MEDIA))
    rows = np.array([rows for _, rows in flat], dtype=np.int64)
    return MediaRows.of_rows(items, files, rows)


document = some.lists(some.integers(0, 5), min_size=1, max_size=12)
"""For each stored token 0, or the rows of the picture for which it stands."""


@settings(deadline=None)
@given(some.lists(document, min_size=1, max_size=4), some.integers(1, 40))
def test_places_are_those_of_the_written_out_document(given: list[list[int]], most: int) -> None:
    pictures = rows_of([[(t, n) for t, n in enumerate(one) if n] for one in given])
    piece = Documents(0, np.array(list(map(len, given))), np.zeros(len(given), dtype=np.int64))
    lengths = pictures.longer(piece, None).lengths
    cut = pictures.longer(piece, most).lengths
    for i, one in enumerate(given):
        whole = [t for t, n in enumerate(one) for _ in range(max(n, 1))]
        assert lengths[i] == len(whole)
        for place in range(len(whole) + 1):
            (stored,) = pictures.num_stored(np.array([i]), np.array([place]))
            assert stored == len(set(whole[:place]))
        begins = pictures.begins(pictures.of_document(i))
        assert begins.tolist() == [whole.index(t) for t, n in enumerate(one) if n]
        kept = int(cut[i])
        assert kept == len(whole) if len(whole) <= most else kept <= most
        assert kept == len(whole) or kept == 0 or whole[kept - 1] != whole[kept]
        following = [t for t in whole if t == whole[kept]] if kept < len(whole) else []
        assert not following or kept + len(following) > most or kept == most


@pytest.fixture
def spec_of(tmp_path: Path) -> Callable[..., MixtureSpec]:
    sources.write_pictures(tmp_path, 4)
    path = str(sources.write_lines(tmp_path / "x.jsonl", ROWS))
    known = {"path": path, "format": "chat", "template": "chatml", "media": MEDIA}
    known["tokenizer"] = sources.tokenizer(tmp_path)

    def make(schedule: Schedule | None = None, **keys: Any) -> MixtureSpec:
        source = SourceSpec(name="web", **(known | keys))
        origin = str(tmp_path / "mix.yaml")
        return MixtureSpec(sources=(source,), origin=origin, schedule=schedule or Schedule())

    return make


def opened(spec: MixtureSpec, max_length: int = 10_000, **keys: Any) -> MediaSource:
    how = {"long_sequence": "truncate", "workers": 0, "say": lambda _: None, **keys}
    (source,) = open_corpus(spec, Opening(max_length=max_length, **how)).sources
    assert isinstance(source, MediaSource)
    return source


@pytest.mark.parametrize("max_length", [10_000, 60, 45, 30])
def test_tokens_masks_and_pictures_are_those_that_are_stored(
    spec_of: Callable[..., MixtureSpec], max_length: int
) -> None:
    source = opened(spec_of(), max_length)
    stored, spans = TokenFile(source.prefix), Spans(f"{source.prefix}.spans")
    items = Items.beside(source.prefix)
    assert items is not None and source.num_rows == len(ROWS)
    num_cut = 0
    for row in range(source.num_rows):
        assert source.document(row) == row
        tokens = stored.read(row, 0, int(stored.lengths[row])).tolist()
        mask = spans.mask(row, 0, len(tokens)).tolist()
        settings = source.media.files.settings
        rows = {int(one["token"]): one for one in items.of(row)}
        whole, is_trained, begins = [], [], []
        for t, (token, trained) in enumerate(zip(tokens, mask, strict=True)):
            sides = (int(rows[t]["height"]), int(rows[t]["width"])) if t in rows else None
            count = 1 if sides is None else settings.resizing.patches(*sides)[0] // 4
            begins += [len(whole)] if t in rows else []
            whole += [token] * count
            is_trained += [trained] * count
        (length,) = source.lengths(np.array([row])).tolist()
        num_cut += length < len(whole)
        assert length == len(whole) or max_length - length < 200
        assert source.tokens(row, 0, length).tolist() == whole[:length]
        assert source.tokens(row, 7, length - 9).tolist() == whole[7 : length - 2]
        found = source.is_trained(row, 0, length - 1)
        assert found.tolist() == is_trained[1:length]
        counts = source.num_trained(np.array([row]), np.array([3]), np.array([length - 1]))
        assert counts.tolist() == [sum(is_trained[4:length])]
        assert [at for at, _ in source.items(row, length)] == [at for at in begins if at < length]
        for at, picture in source.items(row, length):
            assert at + len(picture.values) // 4 <= length
            assert np.asarray(picture.values).shape == picture.values.shape
    assert num_cut == source.table.facts.num_truncated
    assert (num_cut > 0) == (max_length < 10_000)


def test_other_limits_are_other_lengths_of_the_same_tokens(
    spec_of: Callable[..., MixtureSpec],
) -> None:
    large = opened(spec_of())
    small = opened(spec_of(media=MediaSpec(encoder="qwen3-vl", least_pixels=1, most_pixels=9_000)))
    assert large.prefix == small.prefix
    assert small.table.facts.num_tokens < large.table.facts.num_tokens
    orders = [one.order(0).corpus for one in (large, small, opened(spec_of()))]
    assert orders[0] == orders[2] != orders[1]
    other = opened(
        spec_of(media=MediaSpec(encoder="siglip-so400m-384", placeholder="<|image_pad|>"))
    )
    assert other.lengths(np.array([9])).tolist() == large.lengths(np.array([9])).tolist()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"long_sequence": "split"}, "split for source 'web', which has pictures"),
        ({"tokenise": "on-the-fly"}, "on-the-fly for source 'web' with media"),
        ({"format": "text"}, "found media and the format text"),
        ({"long_sequence": "error"}, "document 5 has 64 tokens, the context length is 60"),
    ],
)
def test_what_would_cut_pictures_is_refused(
    spec_of: Callable[..., MixtureSpec], keys: dict[str, str], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        opened(spec_of(**keys), 60)


def test_a_schedule_may_not_cut_pictures(spec_of: Callable[..., MixtureSpec]) -> None:
    schedule = Schedule("steps", (Phase(begin=0, end=0, weights=None, max_length=50),))
    with pytest.raises(ValueError, match=r"the schedule allows 50, and would cut pictures"):
        opened(spec_of(schedule))


def test_a_pair_with_pictures_needs_media_and_the_reverse(
    spec_of: Callable[..., MixtureSpec], tmp_path: Path
) -> None:
    prefix = opened(spec_of()).prefix
    with pytest.raises(ValueError, match="found items and no media"):
        opened(spec_of(path=prefix, format="tokens", media=None))
    folder = MediaSpec(encoder="qwen3-vl", folder=str(tmp_path))
    source = opened(spec_of(path=prefix, format="tokens", media=folder))
    assert np.asarray(source.items(0, 10_000)[0][1].values).any()
    Path(f"{prefix}.items").unlink()
    with pytest.raises(ValueError, match="found media and no items"):
        opened(spec_of(path=prefix, format="tokens", media=folder))


def test_keys_of_media(tmp_path: Path) -> None:
    def read(media: str) -> MediaSpec | None:
        path = tmp_path / "mix.yaml"
        path.write_text(f"sources:\n  web: {{path: x.jsonl, format: chat, media: {media}}}\n")
        return read_data_file(path).training.sources[0].media

    found = read("{encoder: qwen3-vl, most-pixels: 1000000, folder: pictures}")
    folder = str(tmp_path / "pictures")
    assert found == MediaSpec(encoder="qwen3-vl", most_pixels=1_000_000, folder=folder)
    for text, words in (
        ("{most-pixels: 5}", "line 2: .*found no 'encoder', expected qwen3-vl"),
        ("{encoder: qwen9}", "found 'qwen9', expected qwen3-vl or"),
        ("{encoder: clip-l-336, most-pixels: 5}", "found limits of pixels for clip-l-336"),
        ("{encoder: qwen3-vl, most-pixels: 5}", "found least-pixels 65,536 above most-pixels 5"),
        ("3", "found '3', expected keys and values"),
    ):
        with pytest.raises(ValueError, match=words):
            read(text)


def test_pipelines_run_large_pictures_in_the_middle(spec_of: Callable[..., MixtureSpec]) -> None:
    opening = Opening(max_length=300, long_sequence="truncate", workers=0, say=lambda _: None)
    corpus = open_corpus(spec_of(), opening)
    (source,) = corpus.sources
    assert isinstance(source, MediaSource)
    settings = plan_settings(
        batch=BatchSize(sequences=60),
        num_stages=2,
        num_ranks=1,
        tokens_per_rank=300,
        max_length=300,
    )
    planned = StepPlanner(corpus, settings).plan(Position())
    assert planned.failure is None
    rows = zip(planned.step.rows.tolist(), planned.step.lengths.tolist(), strict=True)
    patches = [[one.num_patches for _, one in source.items(*row)] for row in rows]
    largest = np.array([max(one, default=0) for one in patches])
    lengths = planned.step.lengths
    plain = plan_by(settings, lengths)
    made = items_apart(settings, plain, largest)
    assert planned.plan.fingerprint() == made.fingerprint() != plain.fingerprint()
    assert items_apart(replace(settings, num_stages=1), plain, largest) is plain
