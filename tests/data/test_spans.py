"""Spans of trained tokens: what is written is read, counts are the mask's, damage is refused."""

import os
import random
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hdp.data import spans as module
from megatron_hdp.data.index_file import TokenFileError, TokenFileNotFoundError
from megatron_hdp.data.spans import Spans, SpansWriter, concatenate_spans
from tests.data.test_token_file_fuzz import damaged

DOCUMENTS = [[[2, 5], [7, 8]], [], [[0, 3], [3, 4], [9, 20]], [[0, 1]], []]
AS_READ = [[[2, 5], [7, 8]], [], [[1, 3], [3, 4], [9, 20]], [], []]


def write(path, documents):
    with SpansWriter(path) as writer:
        for spans in documents:
            writer.add(np.asarray(spans, dtype=np.int64).reshape(-1, 2))
    return path


def believed(spans, length):
    """The mask by the definition: a token is trained if a span holds it and it is not the first."""
    return np.array([p > 0 and any(a <= p < b for a, b in spans) for p in range(length)], bool)


def array(*values):
    return np.array(values, dtype=np.int64)


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "data.spans", DOCUMENTS)


def test_what_is_written_is_read(path):
    spans = Spans(path)
    assert len(spans) == 5
    assert spans.num_trained_tokens == 4 + 14
    for document, expected in enumerate(AS_READ):
        found = spans.of(document)
        assert found.dtype == np.int64 and found.shape == (len(expected), 2)
        assert found.tolist() == expected
    assert spans.counts(array(), array(), array()).tolist() == []


def test_counts_and_masks_are_those_of_the_definition(path):
    spans = Spans(path)
    for document, given_spans in enumerate(DOCUMENTS):
        expected = believed(given_spans, 25)
        for start in range(24):
            for stop in range(start, 25):
                mask = spans.mask(document, start, stop)
                assert mask.dtype == bool
                assert np.array_equal(mask, expected[start:stop])
                counted = spans.counts(array(document), array(start), array(stop))
                assert counted.tolist() == [expected[start:stop].sum()]


lists_of_documents = st.lists(
    st.lists(st.integers(0, 60), max_size=12, unique=True).map(
        lambda flat: [sorted(flat)[i : i + 2] for i in range(0, len(flat) // 2 * 2, 2)]
    ),
    min_size=1,
    max_size=8,
)


@given(documents=lists_of_documents, data=st.data())
def test_many_counts_at_once(documents, data, tmp_path_factory):
    spans = Spans(write(tmp_path_factory.getbasetemp() / "many.spans", documents))
    row = st.tuples(st.integers(0, len(documents) - 1), st.integers(0, 70), st.integers(0, 70))
    rows = data.draw(st.lists(row, max_size=20))
    chosen = [(document, min(a, b), max(a, b)) for document, a, b in rows]
    columns = np.array(chosen, dtype=np.int64).reshape(-1, 3).T
    expected = [int(believed(documents[d], 80)[a:b].sum()) for d, a, b in chosen]
    found = spans.counts(*columns)
    assert found.dtype == np.int64 and found.tolist() == expected


def test_files_are_joined(tmp_path):
    parts = [DOCUMENTS[:2], [], DOCUMENTS[2:], [[]]]
    paths = [write(tmp_path / f"{i}.spans", part) for i, part in enumerate(parts)]
    whole = write(tmp_path / "whole.spans", [*DOCUMENTS, []])
    concatenate_spans(paths, tmp_path / "joined.spans")
    assert (tmp_path / "joined.spans").read_bytes() == whole.read_bytes()
    concatenate_spans([], tmp_path / "none.spans")
    assert len(Spans(tmp_path / "none.spans")) == 0


def test_pieces_give_what_whole_files_give(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    documents = [np.sort(rng.choice(99, 2 * n, replace=False)).reshape(-1, 2) for n in range(9)]
    whole = write(tmp_path / "whole.spans", documents)
    monkeypatch.setattr(module, "_PIECE", 3)
    spans = Spans(whole)
    concatenate_spans([whole, whole], tmp_path / "twice.spans")
    twice = Spans(tmp_path / "twice.spans")
    assert [twice.of(d).tolist() for d in range(18)] == 2 * [spans.of(d).tolist() for d in range(9)]


@pytest.mark.parametrize(
    "spans", [[[3, 3]], [[5, 2]], [[-1, 2]], [[1, 4], [3, 6]], [[4, 6], [1, 2]], [[0, 0]]]
)
def test_bad_spans_are_refused(tmp_path, spans):
    with pytest.raises(ValueError, match=r"document 1 has the spans .* expected \[start, stop\)"):
        write(tmp_path / "data.spans", [[], spans])
    assert os.listdir(tmp_path) == []


def test_a_failed_block_leaves_the_older_file(path):
    before = path.read_bytes()
    with pytest.raises(RuntimeError), SpansWriter(path) as writer:
        writer.add(array([1, 2]))
        raise RuntimeError
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["data.spans"]


def test_a_damaged_part_leaves_no_target(path):
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TokenFileError, match="truncated"):
        concatenate_spans([path], path.parent / "joined.spans")
    assert os.listdir(path.parent) == ["data.spans"]


@pytest.mark.parametrize("document", [-1, 5])
def test_no_such_document(path, document):
    spans = Spans(path)
    for ask in (
        lambda: spans.of(document),
        lambda: spans.counts(array(0, document), array(0, 0), array(1, 1)),
        lambda: spans.mask(document, 0, 1),
    ):
        with pytest.raises(ValueError, match=f"document {document} of .*: it has 5 documents"):
            ask()


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2)])
def test_no_such_tokens(path, start, stop):
    spans = Spans(path)
    for ask, kind in ((spans.counts, array), (spans.mask, int)):
        with pytest.raises(ValueError, match=r"expected 0 <= start <= stop"):
            ask(kind(0), kind(start), kind(stop))


def patch(path, offset, new):
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(new)] = new
    path.write_bytes(raw)


FIRST, SPANS = 32, 32 + 6 * 8
BEFORE = SPANS + 5 * 16


@pytest.mark.parametrize(
    ("offset", "new", "message"),
    [
        (0, b"MMIDIDX\0", "the file is something else"),
        (8, struct.pack("<Q", 2), "version 2, expected 1"),
        (16, struct.pack("<Q", 2**63), "its header promises"),
        (24, struct.pack("<Q", 4), "its header promises"),
        (FIRST, struct.pack("<q", 1), "document borders"),
        (FIRST + 8, struct.pack("<q", 4), "document borders"),
        (FIRST + 40, struct.pack("<q", 4), "document borders"),
        (FIRST + 8, struct.pack("<qq", 3, 3), "spans of a document overlap"),
        (SPANS, struct.pack("<q", 0), "begins before token 1"),
        (SPANS, struct.pack("<q", 5), "a span is empty"),
        (SPANS + 8, struct.pack("<q", 2**62 + 1), "too long"),
        (SPANS + 8, struct.pack("<q", 6), "counts are not those"),
        (BEFORE, struct.pack("<q", 1), "1 trained tokens lie before"),
        (BEFORE + 16, struct.pack("<q", 5), "counts are not those"),
    ],
)
def test_damage_is_named(path, offset, new, message):
    patch(path, offset, new)
    with pytest.raises(TokenFileError, match=message) as caught:
        Spans(path)
    assert str(path) in str(caught.value) and "make it again" in str(caught.value)


def test_a_short_or_missing_file(path):
    raw = path.read_bytes()
    for size in (0, 7, 8, 31, 32, len(raw) - 8, len(raw) + 8):
        path.write_bytes((raw + bytes(8))[:size])
        with pytest.raises(TokenFileError):
            Spans(path)
    path.unlink()
    with pytest.raises(TokenFileNotFoundError, match="no file of spans"):
        Spans(path)


def check_damaged(folder, seed):
    """One damaged file; returns whether it opened."""
    draw = random.Random(seed)
    documents = []
    for _ in range(draw.randrange(1, 6)):
        flat = sorted(draw.sample(range(1, 50), 2 * draw.randrange(4)))
        documents.append([flat[i : i + 2] for i in range(0, len(flat), 2)])
    path = write(folder / "data.spans", documents)
    path.write_bytes(damaged(path.read_bytes(), draw))
    try:
        spans = Spans(path)
    except TokenFileError as error:
        assert str(path) in str(error), (seed, error)
        return False
    total = 0
    for document in range(len(spans)):
        found = spans.of(document)
        flat = found.ravel()
        assert np.all(flat >= 1) and np.all(found[:, 0] < found[:, 1]), seed
        assert np.all(np.diff(flat) >= 0), seed
        counted = int((found[:, 1] - found[:, 0]).sum())
        assert counted == spans.counts(array(document), array(0), array(2**62))[0], seed
        total += counted
    assert total == spans.num_trained_tokens, seed
    return True


def test_damaged_files(tmp_path, seeds):
    opened = [check_damaged(tmp_path, seed) for seed in seeds]
    assert 0 < sum(opened) < len(opened)  # else it damages nothing, or everything
