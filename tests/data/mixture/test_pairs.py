"""Both sides of a pair are in one step, whatever draws it; what would part them is refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.data import sides
from megatron_hdp.data.index_file import TokenFileError
from megatron_hdp.data.mixture import (
    BatchSize,
    MixtureSpec,
    Opening,
    Phase,
    Position,
    Schedule,
    any_documents,
    open_corpus,
)
from megatron_hdp.data.sides import Sides, write_sides
from megatron_hdp.data.spec import SourceSpec

NUM = 40


def rows_of(seed, num=NUM):
    rng = np.random.default_rng(seed)
    return [
        {"prompt": "q" * 5, "chosen": "c" * int(n), "rejected": "r" * int(m)}
        for n, m in rng.integers(1, 60, (num, 2))
    ]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def opening(tmp_path):
    return Opening(
        max_length=100,
        long_sequence="truncate",  # which commands that look at data take
        tokenizer="byte",
        cache_folder=tmp_path / "cache",
        workers=0,
        say=lambda line: None,
    )


def source(path, **more):
    return SourceSpec(**{"name": path.stem, "path": str(path), "format": "pairs", **more})


def spec_of(*sources, **more):
    return MixtureSpec(**{"sources": sources, "origin": "data.yaml", **more})


def drawn(corpus, batch, num_steps):
    mixture, position, steps = corpus.mixture(corpus.orders(), batch, seed=3), Position(), []
    for _ in range(num_steps):
        steps.append(mixture.step(position))
        position = steps[-1].after
    return steps


def pairs_of(corpus, step):
    """(source, row of the chosen side) of each pair; both sides are as they were written."""
    found = []
    of_step = step.sources, step.rows, step.lengths, step.num_loss_tokens, step.starts
    columns = np.stack(of_step, axis=1).reshape(-1, 2, 5).tolist()
    for (i, row, length, loss, start), (j, other, length_2, loss_2, start_2) in columns:
        assert (i, row + 1, row % 2, start, start_2) == (j, other, 0, 0, 0)
        for number, size, trained, letter in (
            (row, length, loss, "c"),
            (other, length_2, loss_2, "r"),
        ):
            tokens = corpus.tokens(i, number, 0, size)
            assert bytes(tokens[:-1].tolist()).decode() == "q" * 5 + letter * (size - 6)
            assert corpus.is_trained(i, number, 0, size - 1).sum() == trained == size - 5
        found.append((i, row))
    return found


@pytest.mark.parametrize("batch", [BatchSize(6), BatchSize(tokens=300)], ids=["pairs", "tokens"])
def test_both_sides_are_in_one_step(tmp_path, opening, batch):
    paths = [write(tmp_path / f"{name}.jsonl", rows_of(i)) for i, name in enumerate("ab")]
    corpus = open_corpus(spec_of(*map(source, paths)), opening)
    assert (corpus.sides, corpus.group) == ("pairs", 2)
    steps, seen = drawn(corpus, batch, 30), []
    for step in steps:
        seen += pairs_of(corpus, step)
        assert step.lengths.sum() <= (batch.tokens or 10**9)
        assert batch.sequences is None or len(step) == 12
    assert steps[-1].after.sequences == len(seen)
    for name, i in (("a", 0), ("b", 1)):
        mine = [row for j, row in seen if j == i]
        assert steps[-1].after.of(name).rows == len(mine) > NUM
        assert sorted(mine[:NUM]) == list(range(0, 2 * NUM, 2)), "an epoch has each pair once"
    again = drawn(corpus, batch, 3)
    assert all(np.array_equal(a.rows, b.rows) for a, b in zip(again, steps, strict=False))


def test_splits_and_held_out_pairs(tmp_path, opening):
    path = write(tmp_path / "a.jsonl", rows_of(0, 31))
    parts = [spec_of(source(path), split="50,30,20", part=part) for part in range(3)]
    corpora = [open_corpus(one, opening) for one in parts]
    assert [one.sources[0].num_groups for one in corpora] == [16, 9, 6]
    for corpus in corpora:
        for step in drawn(corpus, BatchSize(4), 3):
            pairs_of(corpus, step)
    held = spec_of(source(path), held_out={"a": 7})
    held = [open_corpus(one, opening) for one in (held, replace(held, takes_held_out=True))]
    assert [one.sources[0].num_groups for one in held] == [24, 7]
    assert any_documents(parts[0], opening)


def test_labelled_answers_are_drawn_alone(tmp_path, opening):
    rows = [{"prompt": "q", "completion": "c" * n, "label": n % 3 == 0} for n in range(1, 20)]
    path = write(tmp_path / "a.jsonl", rows)
    corpus = open_corpus(spec_of(source(path, format="labelled")), opening)
    assert (corpus.sides, corpus.group) == ("labelled", 1)
    assert corpus.sources[0].sides.is_good.tolist() == [row["label"] for row in rows]
    (step,) = drawn(corpus, BatchSize(5), 1)
    assert len(step) == 5


REFUSED = {
    "truncate": ({"long_sequence": "truncate"}, {}, "found long-sequence truncate for"),
    "split": ({"long_sequence": "split"}, {}, "long-sequence split for source 'a'"),
    "on the fly": ({"tokenise": "on-the-fly"}, {}, "tokenise: on-the-fly for source 'a'"),
    "too long": ({}, {"max_length": 20}, "the context length is 20 .*: leave rows out"),
    "shorter phase": (
        {},
        {"schedule": Schedule(phases=(Phase(max_length=20),))},
        "the schedule allows 20",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_cut_a_pair_is_refused(tmp_path, opening, name):
    of_source, more, words = REFUSED[name]
    path = write(tmp_path / "a.jsonl", rows_of(0))
    longest = more.pop("max_length", 100)
    with pytest.raises(ValueError, match=words):
        open_corpus(
            spec_of(source(path, **of_source), **more), replace(opening, max_length=longest)
        )


def test_pairs_and_others_do_not_mix(tmp_path, opening):
    pairs = write(tmp_path / "a.jsonl", rows_of(0))
    texts = write(tmp_path / "b.jsonl", [{"text": "hello"}])
    with pytest.raises(ValueError, match="a of pairs, b of no sides"):
        open_corpus(spec_of(source(pairs), source(texts, format="text")), opening)


def test_bad_rows_are_named_and_nothing_is_left(tmp_path, opening):
    rows = rows_of(0)
    rows[7] = {"prompt": "q", "chosen": "c"}
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError, match=r"a.jsonl, line 8: `chosen` without `rejected`"):
        open_corpus(spec_of(source(path)), opening)
    assert not [*(tmp_path / "cache").glob("*.bin"), *(tmp_path / "cache").glob("*.sides")]
    corpus = open_corpus(spec_of(source(path, bad_limit=0.1)), opening)
    assert corpus.sources[0].num_groups == NUM - 1


def test_a_pair_that_was_prepared_elsewhere(tmp_path, opening):
    """A prefix has sides by the file beside it; a file that is damaged is refused."""
    path = write(tmp_path / "a.jsonl", rows_of(0))
    prefix = open_corpus(spec_of(source(path)), opening).sources[0].prefix
    given = spec_of(SourceSpec(name="x", path=prefix))
    assert open_corpus(given, opening).group == 2
    beside = Path(prefix + sides.SUFFIX)
    whole = beside.read_bytes()
    for wrong in (whole[:-1], whole[:-1] + b"\1", whole[:4000]):
        beside.write_bytes(wrong)
        with pytest.raises(TokenFileError, match="sides"):
            open_corpus(given, opening)
    write_sides(str(beside), "pairs", [True, True])
    with pytest.raises(TokenFileError, match="document 1 has no other side"):
        Sides.beside(prefix)
    write_sides(str(beside), "pairs", [True, False])
    with pytest.raises(ValueError, match="sides"):
        open_corpus(given, opening)
