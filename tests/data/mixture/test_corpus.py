"""Sources are opened as a split wants them, and their tokens are those of what was drawn."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.data import TokenFile
from megatron_hdp.data.mixture import BatchSize, Opening, Position, open_corpus, read_data_file
from megatron_hdp.data.mixture.blend_flags import BlendFlags, specs_of_flags
from megatron_hdp.data.spans import SpansWriter
from tests.support.gradients import write_corpus

LENGTHS = {"web": [30, 3, 64, 20, 9, 41, 7, 7], "chat": [12, 40, 8, 25], "code": [100, 5, 90, 31]}
OPENING = Opening(max_length=128, long_sequence="error", tokenizer="byte", cache_folder=None)
TEXT = """
sources: {{web: {{path: web/corpus}}, chat: {{path: chat/corpus}}, code: {{path: code/corpus}}}}
{more}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three pairs; of the second every other piece of four tokens is trained."""
    folder = tmp_path_factory.mktemp("sources")
    for seed, (name, lengths) in enumerate(LENGTHS.items()):
        (folder / name).mkdir()
        write_corpus(folder / name, lengths, seed)
    with SpansWriter(folder / "chat" / "corpus.spans") as writer:
        for length in LENGTHS["chat"]:
            starts = np.arange(4, length, 8)
            writer.add(np.stack([starts, np.minimum(starts + 4, length)], axis=1))
    return folder


def data_file(folder, more=""):
    path = Path(folder) / "data.yaml"
    path.write_text(TEXT.format(more=more))
    return read_data_file(path)


def opened(folder, more="", **changes):
    return open_corpus(data_file(folder, more).training, replace(OPENING, **changes))


def of_flags(folder, split, names=("web", "code")):
    """What each split draws from, by flags."""
    words = [str(folder / name / "corpus") for name in names]
    return specs_of_flags(BlendFlags(data_path=words, split=split))


def steps_of(corpus, count, batch=5, seed=3):
    drawing = corpus.mixture(corpus.orders(), BatchSize(sequences=batch), seed)
    found = [drawing.step(Position())]
    while len(found) < count:
        found.append(drawing.step(found[-1].after))
    return found


def test_tokens_are_those_of_the_documents(folder):
    corpus = opened(folder)
    assert corpus.names == ("web", "chat", "code") and corpus.longest == 100
    files = {name: TokenFile(folder / name / "corpus") for name in LENGTHS}
    seen = {name: [] for name in LENGTHS}
    for step in steps_of(corpus, 20):
        for i in range(len(step)):
            source = int(step.sources[i])
            name, row, length = corpus.names[source], int(step.rows[i]), int(step.lengths[i])
            expected = files[name].read(row, 0, length)
            assert np.array_equal(corpus.tokens(source, row, 0, length), expected)
            assert np.array_equal(corpus.tokens(source, row, 2, 1), expected[2:3])
            labels = np.arange(1, length)  # tokens that are predicted
            trained = np.ones(length - 1, bool) if name != "chat" else labels % 8 >= 4
            assert np.array_equal(corpus.is_trained(source, row, 0, length - 1), trained)
            assert np.array_equal(corpus.is_trained(source, row, 1, length - 1), trained[1:])
            assert step.num_loss_tokens[i] == trained.sum()
            seen[name].append(row)
    for name, lengths in LENGTHS.items():
        first_epoch = seen[name][: len(lengths)]
        assert sorted(first_epoch) == list(range(len(lengths)))


def test_weights_by_size_where_none_are_given(folder):
    corpus = opened(folder)
    total = sum(map(sum, LENGTHS.values()))
    expected = [sum(one) / total for one in LENGTHS.values()]
    assert corpus.schedule.settings[0].weights == pytest.approx(expected)
    weights = opened(folder, "weight-unit: loss-tokens").schedule.settings[0].weights
    trained = sum(int((np.arange(1, one) % 8 >= 4).sum()) for one in LENGTHS["chat"])
    assert weights[1] == pytest.approx(trained / (trained + sum(LENGTHS["web"] + LENGTHS["code"])))


def test_held_out_sequences(folder):
    file = data_file(folder, "validation: {web: 3, code: 1}")
    training, validation = (open_corpus(one, OPENING) for one in (file.training, file.validation))
    assert [one.num_rows for one in training.sources] == [5, 4, 3]
    assert validation.names == ("web", "code")
    assert [(one.first_row, one.num_rows) for one in validation.sources] == [(5, 3), (3, 1)]
    trained = {
        (training.names[source], int(row))
        for step in steps_of(training, 30)
        for source, row in zip(step.sources, step.rows, strict=True)
    }
    step = steps_of(validation, 1, batch=4)[0]
    places = zip(step.sources, step.rows, strict=True)
    documents = {validation.words_for([source], [row]) for source, row in places}
    rows = [("web", 5), ("web", 6), ("web", 7), ("code", 3)]
    assert documents == {f"document {n} of {folder / name / 'corpus'}" for name, n in rows}
    assert trained == {
        (name, n) for name, rows in zip(LENGTHS, (5, 4, 3), strict=True) for n in range(rows)
    }


def test_no_document_is_trained_on_and_held_out(folder):
    """100, 5, 90 and 31 tokens in pieces of 20: five, one, five and two rows."""
    spec = data_file(folder, "validation: {code: 4}")
    opening = replace(OPENING, max_length=20, long_sequence="split")
    training, validation = (open_corpus(one, opening) for one in (spec.training, spec.validation))
    (code,) = validation.sources
    assert (code.first_row, code.num_rows) == (9, 4)  # the last two pieces of 90, those of 31
    assert training.sources[2].num_rows == 6  # the other three pieces of 90 are nobody's


def test_more_held_out_than_there_is(folder):
    with pytest.raises(ValueError, match="takes 4 sequences of source 'code', which has"):
        opened(folder, "validation: {code: 4}")


def test_the_split_of_flags(folder):
    specs = of_flags(folder, "50,50,0")
    train, valid = (open_corpus(specs[name], OPENING) for name in ("train", "valid"))
    assert [one.num_rows for one in train.sources] == [4, 2]
    assert [one.num_rows for one in valid.sources] == [4, 2]
    with pytest.raises(ValueError, match="no sequence to train on: 0 documents chosen"):
        open_corpus(specs["test"], OPENING)


def test_a_source_without_a_document_in_a_split_is_left_out(folder):
    web, code = (str(folder / name / "corpus") for name in ("web", "code"))
    for split, expected in (("85,15,0", [(web, 1), (code, 1)]), ("90,10,0", [(web, 1)])):
        valid = open_corpus(of_flags(folder, split)["valid"], OPENING)
        assert [(one.prefix, one.num_rows) for one in valid.sources] == expected


def test_a_curriculum_of_long_sequences_needs_a_policy(folder):
    more = "schedule: [{from: 0, max-length: 50}, {from: 9, weights: {web: 1}, max-length: 99}]"
    with pytest.raises(ValueError, match="source 'web' has a sequence of 64 tokens, .* allows 50"):
        opened(folder, more)
    corpus = opened(folder, more, long_sequence="split")
    assert corpus.longest == 99
    assert steps_of(corpus, 1)[0].max_length == 50
    with pytest.raises(ValueError, match="found 500, expected at most --seq-length 128"):
        opened(folder, "schedule: [{from: 0, max-length: 500}]")


def test_spans_of_other_documents_are_refused(folder):
    with SpansWriter(folder / "web" / "corpus.spans") as writer:
        writer.add(np.array([[1, 2]]))
    with pytest.raises(ValueError, match="spans of 1 documents, the .idx beside it has 8"):
        opened(folder)
    (folder / "web" / "corpus.spans").unlink()


def test_orders_of_sources(folder):
    """Of one source alone the order is that of runs that began before there were mixtures."""
    corpus = opened(folder)
    keys = [one.key for one in corpus.orders().values()]
    assert len(set(keys)) == 3 and 0 not in keys
    alone = of_flags(folder, "1", ["web"])
    assert open_corpus(alone["train"], OPENING).orders()["corpus"].key == 0
    contents = [one.contents() for one in corpus.sources]
    chat = replace(corpus.sources[1], spans=None)
    assert len({*contents, chat.contents()}) == 4


def test_a_cache_folder_changes_nothing(folder, tmp_path):
    cached, plain = opened(folder, cache_folder=tmp_path / "cache"), opened(folder)
    assert cached.orders() == plain.orders()
    for one, other in zip(steps_of(cached, 5), steps_of(plain, 5), strict=True):
        assert one.after == other.after
    assert list((tmp_path / "cache").iterdir())
