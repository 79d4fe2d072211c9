"""What is tokenised on the fly gives the same steps as what is tokenised ahead, and no others."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest

from megatron_hdp.data.mixture import (
    BatchSize,
    Opening,
    Position,
    TextSource,
    open_corpus,
    read_data_file,
)
from megatron_hdp.data.mixture.stream import SourceStream
from tests.data.chat import tiny_tokenizer
from tests.data.prepare.corpora import conversation, texts_of, write_lines
from tests.support.gradients import write_corpus
from tests.support.mixtures import Lengths, TableOrder

OPENING = Opening(
    max_length=100, long_sequence="truncate", tokenizer="byte", cache_folder=None, workers=0
)
WEIGHTS = "schedule: [{from: 0, weights: {web: 0.5, code: 0.2, books: 0.3}, max-length: 80}]"


@pytest.fixture
def folder(tmp_path):
    """Lines in two files, one of them with blank lines; tokens; files of text."""
    texts = texts_of(90, seed=1, longest=140)
    write_lines(tmp_path / "web" / "a.jsonl", texts[:50])
    rest = "\n \t\n".join(json.dumps({"text": text}) for text in texts[50:])
    (tmp_path / "web" / "b.jsonl").write_text(f"\n{rest}")
    (tmp_path / "code").mkdir()
    write_corpus(tmp_path / "code", [30, 3, 64, 99, 9, 41, 7, 7])
    (tmp_path / "books").mkdir()
    for number, text in enumerate(texts_of(12, seed=2)):
        (tmp_path / "books" / f"{number:02}.txt").write_text(text)
    return tmp_path


def opened(folder, tokenise, more=WEIGHTS, keys="", names=("web", "books"), opening=OPENING):
    said = f", tokenise: {tokenise}{keys}"
    lines = [f"  {name}: {{path: {name}{said if name in names else ''}}}" for name in names]
    if "books" in names:
        lines.append("  code: {path: code/corpus}")
    path = folder / f"{tokenise}.yaml"
    path.write_text("\n".join(["sources:", *lines, more, ""]))
    spec = read_data_file(path)
    return open_corpus(spec.training, opening), spec


def steps_of(corpus, count, position=None, batch=None):
    drawing = corpus.mixture(corpus.orders(), batch or BatchSize(sequences=9), 3)
    found = [drawing.step(position or Position())]
    while len(found) < count:
        found.append(drawing.step(found[-1].after))
    return found


def contents_of(corpus, step):
    """All of a step, as far as training sees it."""
    found = []
    for i in range(len(step)):
        place = (int(step.sources[i]), int(step.rows[i]))
        start, length, labels = (
            int(column[i]) for column in (step.starts, step.lengths, step.num_labels)
        )
        tokens = corpus.tokens(*place, start, length)
        trained = corpus.is_trained(*place, start, start + labels)
        assert tokens.dtype == np.int64 and trained.sum() == step.num_loss_tokens[i]
        found.append((place, start, length, labels, tokens.tolist(), trained.tolist()))
    return found


def assert_same(one, other, count, **draw):
    for mine, theirs in zip(
        steps_of(one, count, **draw), steps_of(other, count, **draw), strict=True
    ):
        assert mine.after == theirs.after and len(mine)
        assert contents_of(one, mine) == contents_of(other, theirs)


@pytest.mark.parametrize("batch", [BatchSize(sequences=9), BatchSize(tokens=500)])
def test_a_mixture_is_drawn_the_same(folder, batch):
    """Over several epochs, cut by the schedule, and with weights of tokens."""
    (ahead, _), (flying, _) = opened(folder, "ahead"), opened(folder, "on-the-fly")
    web, books, code = flying.sources
    assert isinstance(web, TextSource) and isinstance(books, TextSource)
    assert not isinstance(code, TextSource)
    assert [one.num_rows for one in flying.sources] == [one.num_rows for one in ahead.sources]
    assert_same(flying, ahead, 50, batch=batch)
    last = steps_of(flying, 50, batch=batch)[-1].after
    assert last.of("web").rows > web.num_rows


def test_a_run_that_goes_on_is_the_same(folder):
    """Another process has decoded nothing of what was drawn before."""
    first, _ = opened(folder, "on-the-fly")
    steps = steps_of(first, 12)
    again, _ = opened(folder, "on-the-fly")
    assert again.orders() == first.orders()
    for mine, theirs in zip(steps_of(again, 6, steps[5].after), steps[6:], strict=False):
        assert mine.after == theirs.after
        assert contents_of(again, mine) == contents_of(first, theirs)


@pytest.mark.parametrize("unit", ["tokens", "loss-tokens", "sequences"])
def test_conversations_are_drawn_the_same(tmp_path, unit):
    pytest.importorskip("jinja2", reason="pip install 'megatron-hdp[data]'")
    pytest.importorskip("transformers", reason="pip install 'megatron-hdp[tokenizers]'")
    rows = "".join(json.dumps(conversation(n, rounds=1 + n % 3)) + "\n" for n in range(60))
    for name in ("chat", "more"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_text(rows if name == "chat" else rows[: len(rows) // 2])
        rows = rows.replace("what", "who")
    (tmp_path / "more" / "x.jsonl").write_text(rows)
    opening = replace(OPENING, tokenizer=tiny_tokenizer.write(tmp_path / "hf"))
    schedule = "schedule: [{from: 0, weights: {chat: 1, more: 2}, max-length: 60}]"
    more = f"weight-unit: {unit}\n{schedule}"
    keys = ", format: chat, template: chatml"
    ahead, flying = (
        opened(tmp_path, how, more, keys, ("chat", "more"), opening)[0]
        for how in ("ahead", "on-the-fly")
    )
    steps = steps_of(flying, 10)
    lengths = np.concatenate([one.lengths for one in steps])
    loss = np.concatenate([one.num_loss_tokens for one in steps])
    assert lengths.max() == 60 and 0 < loss.sum() < lengths.sum() / 1.5
    assert_same(flying, ahead, 20)


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "stream"])
def test_tables_are_drawn_the_same(tmp_path, suffix):
    pyarrow = pytest.importorskip("pyarrow", reason="pip install 'megatron-hdp[data]'")
    from pyarrow import parquet

    table = pyarrow.table({"text": texts_of(70, seed=4, longest=140)})
    (tmp_path / "web").mkdir()
    path = tmp_path / "web" / ("x.parquet" if suffix == "parquet" else "x.arrow")
    if suffix == "parquet":
        parquet.write_table(table, path, row_group_size=16)
    else:
        make = pyarrow.ipc.new_file if suffix == "arrow" else pyarrow.ipc.new_stream
        with pyarrow.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=16)
    ahead, flying = (opened(tmp_path, how, "", "", ("web",))[0] for how in ("ahead", "on-the-fly"))
    assert_same(flying, ahead, 20)
    assert flying.words_for([0], [20]).endswith(f"{path.name}, row 21")


def test_what_is_held_out_is_the_same(folder):
    more = f"{WEIGHTS}\nvalidation: {{web: 7, books: 2}}"
    specs = [opened(folder, how, more)[1] for how in ("ahead", "on-the-fly")]
    for part in ("training", "validation"):
        ahead, flying = (open_corpus(getattr(spec, part), OPENING) for spec in specs)
        assert_same(flying, ahead, 15)
    rows = [one.num_rows for one in flying.sources]
    assert flying.names == ("web", "books") and rows == [7, 2]
    too_many = opened(folder, "on-the-fly", f"{WEIGHTS}\nvalidation: {{web: 7}}")[1]
    with pytest.raises(ValueError, match="takes 90 sequences of source 'web', which has 90"):
        open_corpus(replace(too_many.training, held_out={"web": 90}), OPENING)


def test_a_source_that_ends(folder):
    keys = ", max-epochs: 2"
    ahead, flying = (opened(folder, how, keys=keys)[0] for how in ("ahead", "on-the-fly"))
    assert_same(flying, ahead, 60)
    drawing = flying.mixture(flying.orders(), BatchSize(sequences=9), 3)
    last = steps_of(flying, 60)[-1].after
    assert all(one.stream.has_ended(last.of(one.name).rows) for one in drawing.sources[:2])


def with_gaps(folder):
    """Every third line is empty, bad, or blank text."""
    texts = texts_of(30, seed=5, longest=60)
    lines = []
    for number, text in enumerate(texts):
        lines.append(json.dumps({"text": text}))
        lines.append([json.dumps({"text": ""}), "{no json", json.dumps({"text": None})][number % 3])
        lines.append("   ")
    (folder / "web").mkdir()
    (folder / "web" / "x.jsonl").write_text("\n".join(lines))
    return texts


def alone(folder, keys=", bad-limit: 0.5", **settings):
    return opened(folder, "on-the-fly", "", keys, ("web",), replace(OPENING, **settings))[0]


def test_what_has_no_token_is_passed_over(tmp_path):
    """It takes no place in a step, whose position counts it."""
    texts = with_gaps(tmp_path)
    corpus = alone(tmp_path)
    (source,) = corpus.sources
    assert source.num_rows == 60
    steps = steps_of(corpus, 30, batch=BatchSize(sequences=4))
    drawn = [
        bytes(corpus.tokens(0, int(step.rows[i]), 0, int(step.lengths[i]) - 1).tolist()).decode()
        for step in steps
        for i in range(len(step))
    ]
    assert all(len(step) == 4 and step.lengths.min() > 1 for step in steps)
    epochs = [drawn[:30], drawn[30:60], drawn[60:90], drawn[90:120]]
    assert [sorted(one) for one in epochs] == [sorted(texts)] * 4
    assert source.bad >= 20
    assert 200 < steps[-1].after.of("web").rows <= 240


def test_positions_do_not_depend_on_how_far_one_looked():
    """Rows without a token behind the last sequence are not counted before they are passed."""
    lengths = [5, 0, 0, 12, 0, 3, 0, 0]
    for splits_long, expected in (
        (False, [(1, 0), (4, 0), (6, 0), (9, 0), (12, 0)]),
        (True, [(1, 0), (3, 5), (3, 10), (4, 0), (6, 0), (9, 0)]),
    ):
        stream = SourceStream(Lengths(lengths), TableOrder(), splits_long=splits_long)
        for count in range(1, 17):
            pieces = stream.pieces(0, 0, count, 5)
            found = [pieces.after(taken) for taken in range(1, len(pieces) + 1)]
            shared = min(len(found), len(expected))
            assert found[:shared] == expected[:shared]
        assert len(found) >= len(expected)


def test_a_source_that_ends_with_nothing(tmp_path):
    """Of an epoch whose last rows have no token, the end is where the last token was."""
    with_gaps(tmp_path)
    corpus = alone(tmp_path, ", bad-limit: 0.5, max-epochs: 1")
    drawing = corpus.mixture(corpus.orders(), BatchSize(sequences=7), 3)
    position, drawn, ends = Position(), 0, []
    while not drawing.is_over(position):
        step = drawing.step(position)
        assert len(step)
        drawn, position = drawn + len(step), step.after
        ends.append(drawing.is_over(position))
    assert drawn == 30 and ends == [False] * 4 + [True]
    assert len(drawing.step(position)) == 0


def test_the_end_is_behind_the_last_row_with_a_token():
    stream = SourceStream(
        Lengths([5, 0, 3] + [0] * 9), TableOrder(), splits_long=True, max_epochs=2
    )
    assert [n for n in range(25) if stream.has_ended(n)] == [*range(15, 25)]
    endless = SourceStream(Lengths([5, 0]), TableOrder(), splits_long=True)
    assert not endless.has_ended(10**9)


def test_nothing_but_empty_records_is_an_error(tmp_path):
    write_lines(tmp_path / "web" / "x.jsonl", [""] * 40)
    corpus = alone(tmp_path)
    with pytest.raises(ValueError, match="'web': none of its 40 records has a token"):
        steps_of(corpus, 1)


def test_other_data_are_another_order(folder):
    one, _ = opened(folder, "on-the-fly")
    before = {source.name: (source.order(1), source.contents()) for source in one.sources}
    path = folder / "web" / "a.jsonl"
    text = path.read_text()
    path.write_text(text.replace("a", "b"))  # as many bytes
    other, _ = opened(folder, "on-the-fly")
    assert other.sources[0].order(1) == before["web"][0]
    assert other.sources[0].contents() != before["web"][1]
    assert other.sources[1].contents() == before["books"][1]
    path.write_text(text + text.splitlines()[0] + "\n")
    longer, _ = opened(folder, "on-the-fly")
    assert longer.sources[0].order(1).corpus != before["web"][0].corpus
    path.write_text(text)
    without_end, _ = opened(folder, "on-the-fly", keys=", append-eod: false")
    assert without_end.sources[0].order(1).corpus != before["web"][0].corpus


def test_a_corpus_that_was_moved_is_the_same(folder):
    before = opened(folder, "on-the-fly")[0].orders()
    moved = folder.rename(folder.parent / "moved")
    assert opened(moved, "on-the-fly")[0].orders() == before


def test_what_cannot_be_tokenised_on_the_fly(folder):
    with pytest.raises(ValueError, match=r"line 2: source 'web': .*long-sequence: split, expected"):
        opened(folder, "on-the-fly", keys=", long-sequence: split")
    (folder / "web" / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    with pytest.raises(ValueError, match=r"found .*c\.jsonl\.gz, which is compressed \(gzip\)"):
        opened(folder, "on-the-fly")
    with pytest.raises(ValueError, match=r"which holds tokens, expected text or conversations"):
        opened(folder, "on-the-fly", "", ", format: tokens", ("web",))


def test_a_context_that_is_too_short_needs_a_policy(folder):
    more = WEIGHTS.replace("80", "100")
    corpus, _ = opened(folder, "on-the-fly", more, ", long-sequence: error")
    with pytest.raises(ValueError, match=r"(jsonl, line \d+|\.txt) has 1\d\d tokens, the context"):
        steps_of(corpus, 20)
    with pytest.raises(ValueError, match="may have a sequence of 100 tokens, the schedule allows"):
        opened(folder, "on-the-fly", keys=", long-sequence: error")


def test_sizes_are_estimated(folder):
    corpus, _ = opened(folder, "on-the-fly", "")
    exact, _ = opened(folder, "ahead", "")
    for mine, theirs in zip(corpus.sources, exact.sources, strict=True):
        assert mine.size("tokens") == pytest.approx(theirs.size("tokens"))  # all are in the sample
    assert "90 records of web to train on, about" in corpus.describe(0, "to train on")
