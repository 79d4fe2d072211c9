"""Pictures through a constructor: decoded by loaders, mapped by the rank that encodes them."""

import os
from contextlib import ExitStack

import numpy as np
import pytest

from megatron_hdp.data.mixture import BatchSize, Position
from megatron_hdp.data.steps import LocalLoaders, Reader, StepPlanner, WantedItem
from megatron_hdp.data_plane.loaders import RayLoaders
from megatron_hdp.data_plane.node_service import NodeService
from megatron_hdp.data_plane.roles import decoding
from megatron_hdp.data_plane.wire import DataPlaneLost, NodeServer, SegmentFolder
from tests.data.media import sources
from tests.support.node import until
from tests.support.thread_plane import (
    Others,
    loading_of,
    plan_settings,
    planner_of,
    require_same,
    setup_of,
)

pytest.importorskip("jinja2", reason="pip install 'megatron-hdp[data]'")
pytest.importorskip("transformers", reason="pip install 'megatron-hdp[tokenizers]'")

READER = Reader(0, 10**6)
SETTINGS = plan_settings(batch=BatchSize(sequences=8), tokens_per_rank=100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("pictures")
    sources.write_mixture(made, "some text\n" * 5)
    return made


@pytest.fixture(scope="module")
def setup(folder):
    return setup_of(folder / "mix.yaml", SETTINGS)


@pytest.fixture(scope="module")
def services(setup):
    return loading_of(setup)


class Node:
    """A constructor behind its socket, and loaders of ranks."""

    def __init__(self, stack, services, setup, folder):
        folder.chmod(0o700)
        self.others = Others(services)
        self.segments = SegmentFolder.make("steps", folder)
        service = NodeService(self.others, self.segments, 20.0)
        stack.callback(service.close)
        self._server = NodeServer(folder / "node.sock", service)
        stack.callback(self._server.close)
        self._setup, self._stack = setup, stack
        self.corpus = planner_of(setup).corpus

    def rank(self):
        made = RayLoaders(self._server.path, self._setup, READER)
        self._stack.callback(made.close)
        return made

    def wanted(self, step):
        """All pictures of a step."""
        found = []
        drawn = step.planned.step
        columns = (drawn.sources, drawn.rows, drawn.lengths)
        for source, row, length in zip(*(one.tolist() for one in columns), strict=True):
            if self.corpus.sources[source].has_media:
                items = self.corpus.sources[source].items(row, length)
                found += [WantedItem(source, row, i, one) for i, (_, one) in enumerate(items)]
        return found

    def pictures(self):
        return [name for name in os.listdir(self.segments.path) if name.startswith("pictures")]


@pytest.fixture
def node(services, setup, tmp_path):
    with ExitStack() as stack:
        yield Node(stack, services, setup, tmp_path)


def test_a_rank_is_told_the_whole_step(node):
    """Any rank may encode any of its pictures."""
    local = LocalLoaders(StepPlanner(node.corpus, SETTINGS), READER)
    expected, found = local.prepare(Position()), node.rank().get(Position())
    require_same(found, expected)
    assert found.planned.plan.fingerprint() == expected.planned.plan.fingerprint()
    mine, theirs = vars(found.planned.step), vars(expected.planned.step)
    assert mine.keys() == theirs.keys()
    for name, one in mine.items():
        np.testing.assert_equal(one, theirs[name])


@pytest.mark.parametrize("most", [1, 30_000, 2**23])
def test_pixels_are_those_that_the_rank_would_decode(node, monkeypatch, most):
    monkeypatch.setattr(decoding, "_BLOCK_BYTES", most)
    rank = node.rank()
    wanted = node.wanted(rank.get(Position()))
    found = rank.decode(Position(), wanted)
    assert len(wanted) > 8
    for one, values in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(values.reshape(one.item.values.shape), one.item.array)
        values[0] ^= 1  # the rank's own copy
    asked = [len(pictures.rows) for _, _, pictures in node.others.decoded]
    assert sum(asked) == len(wanted)
    assert (max(asked) == 1) == (most == 1) and (len(asked) == 1) == (most == 2**23)


def test_pixels_lie_in_shared_memory_until_the_next_are_asked_for(node):
    rank = node.rank()
    wanted = node.wanted(rank.get(Position()))
    found = rank.decode(Position(), wanted[:2])
    (first,) = node.pictures()
    assert (node.segments.path / first).stat().st_size == sum(one.nbytes for one in found)
    rank.decode(Position(), wanted[2:3])
    (second,) = node.pictures()
    assert second != first
    np.testing.assert_array_equal(found[0], wanted[0].item.decoded().ravel())
    rank.close()
    until(lambda: not node.pictures())


def test_segments_that_go_before_they_are_mapped_are_asked_for_again(node, monkeypatch):
    rank = node.rank()
    wanted = node.wanted(rank.get(Position()))[:1]
    attach, tries = SegmentFolder.attach, []

    def gone_once(self, name):
        tries.append(name)
        if len(tries) == 1:
            raise FileNotFoundError(name)
        return attach(self, name)

    monkeypatch.setattr(SegmentFolder, "attach", gone_once)
    (found,) = rank.decode(Position(), wanted)
    np.testing.assert_array_equal(found, wanted[0].item.decoded().ravel())
    assert len(set(tries)) == 2


def test_a_damaged_picture_is_told_in_words(node, folder):
    rank = node.rank()
    wanted = node.wanted(rank.get(Position()))
    path = folder / sources.name(1)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 3])
    try:
        found = rank.decode(Position(), wanted)
        expected = [one.item.decoded() for one in wanted]
    finally:
        path.write_bytes(whole)
    whys = [one for one in found if isinstance(one, str)]
    assert whys and whys == [one for one in expected if isinstance(one, str)]
    assert len(whys) < len(found)


def test_a_picture_of_another_size_is_no_answer(node, services, monkeypatch):
    """The planted fault: a loader that sends the pixels of something else."""
    rank = node.rank()
    wanted = node.wanted(rank.get(Position()))
    wrong = [np.zeros(7, dtype=np.uint8)]
    monkeypatch.setattr(services["pictures"], "decode", lambda wanted: wrong)
    with pytest.raises(DataPlaneLost, match="sent a picture of 7 bytes, expected"):
        rank.decode(Position(), wanted[:1])
    assert node.pictures() == []


def test_text_has_no_pictures(services):
    wanted = decoding.WantedItems(np.array([0]), np.array([0]))
    with pytest.raises(ValueError, match="pictures of source 'text'.*it has no media"):
        services["text"].decode(wanted)
