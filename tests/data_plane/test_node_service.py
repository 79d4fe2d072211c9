"""A node's constructor behind its socket, as the ranks see it; planner and loaders are threads."""

import os
import shutil
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest

from megatron_hdp.data.mixture import Position
from megatron_hdp.data.steps import Reader
from megatron_hdp.data_plane.cluster.job_folder import LOST
from megatron_hdp.data_plane.loaders import RayLoaders
from megatron_hdp.data_plane.node_service import NodeService
from megatron_hdp.data_plane.records import to_plain
from megatron_hdp.data_plane.wire import DataPlaneLost, NodeServer, SegmentFolder
from tests.support.node import client_of, until
from tests.support.thread_plane import (
    Others,
    Planner,
    local_steps,
    plan_settings,
    planner_of,
    require_same,
)

V = 10**6


@pytest.fixture
def others(services):
    return Others(services)


@pytest.fixture
def segments(tmp_path):
    return SegmentFolder.make("steps", tmp_path)


@pytest.fixture
def service(others, segments):
    made = NodeService(others, segments, 20.0)
    yield made
    made.close()


@pytest.fixture
def socket(service, tmp_path):
    tmp_path.chmod(0o700)
    server = NodeServer(tmp_path / "node.sock", service)
    yield server.path
    server.close()


@pytest.fixture
def ranks(socket, setup):
    """Make the loaders of ranks."""
    with ExitStack() as stack:

        def make(reader, of=setup):
            made = RayLoaders(socket, of, reader)
            stack.callback(made.close)
            return made

        yield make


def hello(setup, reader=None):
    return {
        "request": "hello",
        "setup": to_plain(setup),
        "reader": to_plain(reader or Reader(0, V)),
    }


def test_ranks_get_the_steps_of_local_loaders(ranks, corpus, segments):
    """Tensor-parallel ranks read the same, the stages between the ends nothing."""
    node = [
        *(Reader(0, V), Reader(0, V), Reader(1, V, reads_mask=False)),
        *(Reader(3, V, token_multiple=4), Reader(2, V, reads_tokens=False, reads_mask=False)),
        Reader(0, V, num_further=3),
    ]
    loaders = [ranks(reader) for reader in node]
    expected = [local_steps(corpus, plan_settings(), reader, 5) for reader in node]
    position = Position()
    for of_node in zip(*expected, strict=True):
        for one in loaders:
            one.expect(position)
        for one, step in zip(loaders, of_node, strict=True):
            require_same(one.get(position), step)
        position = of_node[0].totals.after
    assert loaders[0].num_loaders == 3
    assert 0 <= loaders[0].steps_ahead <= 3
    until(lambda: len(os.listdir(segments.path)) <= 4 * len(set(node)))


def test_a_step_that_was_mapped_is_read_after_it_was_dropped(ranks, corpus, segments, service):
    one = ranks(Reader(0, V))
    step = one.get(Position())
    position = step.totals.after
    for _ in range(6):
        position = one.get(position).totals.after
    assert not (segments.path / "step-0").exists()
    require_same(step, local_steps(corpus, plan_settings(), Reader(0, V), 1)[0])
    step.micro_batches[0].tokens[:] = 7  # the rank's own copy


def test_a_segment_that_goes_before_it_is_mapped_is_asked_for_again(
    ranks, corpus, segments, monkeypatch
):
    one, missed = ranks(Reader(0, V)), []
    real = SegmentFolder.attach

    def attach(self, path):
        if len(missed) < 2:
            missed.append(path)
            raise FileNotFoundError(path)
        return real(self, path)

    monkeypatch.setattr(SegmentFolder, "attach", attach)
    require_same(one.get(Position()), local_steps(corpus, plan_settings(), Reader(0, V), 1)[0])
    assert len(missed) == 2


def test_a_folder_that_somebody_removes_is_told(ranks, segments):
    """As what cleans up old temporary files does."""
    one = ranks(Reader(0, V))
    position = one.get(Position()).totals.after

    def is_gone():
        shutil.rmtree(segments.path, ignore_errors=True)  # a step may just be written there
        return not segments.path.exists()

    until(is_gone)
    found = f"found that somebody has removed {segments.path}, expected it until the job ends"
    with pytest.raises(DataPlaneLost, match=found):
        for _ in range(9):
            position = one.get(position).totals.after


def test_its_figures(setup, ranks, others, service):
    one = ranks(Reader(0, V))
    one.get(Position())
    until(lambda: service.figures()["splits"]["train"]["steps_ahead"] == 2)
    found = service.figures()
    of_split = found["splits"]["train"]
    assert found["segment_bytes"] > 1000
    assert (found["takeovers"], found["longest_takeover_s"]) == (2, 0.5)
    assert (of_split["steps"], of_split["readers"]) == (3, 1)
    assert of_split["fetched_bytes"] > 0
    assert others.setups == [setup]


def test_for_ranks_that_end_nothing_is_made(socket, setup, service):
    def readers():
        return service.figures()["splits"]["train"]["readers"]

    with client_of(socket, hello=hello(setup)) as first:
        with client_of(socket, hello=hello(setup)) as second:
            second.call(hello(setup), 5)  # again, as after a restart
            assert readers() == 1
            with client_of(socket, hello=hello(setup, Reader(1, V))):
                assert readers() == 2
            until(lambda: readers() == 1)
        time.sleep(0.05)
        assert readers() == 1  # the first one reads the same
        assert first.call({"request": "get", "position": Position().to_record()}, 20)["segment"]
    until(lambda: readers() == 0)


def test_a_reader_that_changes_is_another_one(socket, setup, service):
    with client_of(socket, hello=hello(setup)) as client:
        client.call(hello(setup, Reader(2, V)), 5)
        client.call({"request": "get", "position": Position().to_record()}, 20)
    assert {ranks for _, ranks in service._others.planners["train"].asked} == {(2,)}


def test_another_order_of_the_data_replaces_the_first(ranks, setup, corpus, others, service):
    first = ranks(Reader(0, V))
    first.get(Position())
    orders = {name: replace(one, key=one.key + 1) for name, one in setup.orders.items()}
    second = ranks(Reader(0, V))
    second.follow(orders)
    found = second.get(Position())
    again = planner_of(replace(setup, orders=orders))
    assert found.totals.fingerprints == Planner(again)(Position(), [0]).totals.fingerprints
    assert [one.orders for one in others.setups] == [setup.orders, orders]
    # the one that stays gets the order that holds now
    assert first.get(Position()).totals.fingerprints == found.totals.fingerprints


def test_two_splits_are_apart(ranks, setup, others, service):
    ranks(Reader(0, V)).get(Position())
    ranks(Reader(0, V), of=replace(setup, split="valid")).get(Position())
    assert set(service.figures()["splits"]) == {"train", "valid"}
    assert [one.split for one in others.setups] == ["train", "valid"]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"request": "open"}, "found the request 'open', expected hello, get"),
        ({}, "found the request None"),
        ({"request": "get", "position": {}}, "without a hello before it"),
    ],
)
def test_other_requests_are_mistakes(socket, request_, words):
    with client_of(socket) as client, pytest.raises(ValueError, match=words):
        client.call(request_, 5)


def test_a_hello_with_other_values_is_a_mistake(socket, setup, others):
    said = hello(setup)
    said["setup"]["settings"]["num_ranks"] = "4"
    with client_of(socket) as client, pytest.raises(ValueError, match="found '4', expected"):
        client.call(said, 5)
    assert others.setups == []


def test_what_the_loaders_say_of_the_data_reaches_the_rank(ranks, others):
    def changed(source, loaders, wanted):
        raise ValueError("corpus.bin has changed")

    others.load = changed
    with pytest.raises(ValueError, match=r"corpus\.bin has changed"):
        ranks(Reader(0, V)).get(Position())


def test_a_source_that_the_run_goes_on_without_ends_nothing(ranks, setup, others):
    """The step comes without its tokens, and the planner hears of it."""

    def gone(source, loaders, wanted):
        if source == "web":
            raise FileNotFoundError(2, "No such file", "web.bin")
        return real(source, loaders, wanted)

    sources = [replace(one, on_failure="go-on-without") for one in setup.spec.sources]
    real, others.load = others.load, gone
    of = replace(setup, spec=replace(setup.spec, sources=tuple(sources)))
    (lost,) = ranks(Reader(0, V), of=of).get(Position()).lost
    assert (lost.name, lost.why) == ("web", "[Errno 2] No such file: 'web.bin'")
    assert others.failed[0] == ("train", "web", lost.why)


def test_who_waits_for_sources_that_may_fail_waits_longer(setup):
    """Each that says how long its rows are may hang while a step is planned."""

    def waits(*policies):
        sources = tuple(
            replace(one, on_failure=policy, tokenise=tokenise)
            for one, (policy, tokenise) in zip(setup.spec.sources, policies, strict=False)
        )
        found = replace(setup, spec=replace(setup.spec, sources=sources))
        return found.planning_waits, found.making_waits

    assert waits(("error", "ahead"), ("error", "on-the-fly")) == (1, 1)
    assert waits(("go-on-without", "ahead"), ("error", "on-the-fly")) == (1, 2)
    assert waits(*[("go-on-without", "on-the-fly")] * 2) == (3, 4)


@pytest.mark.parametrize("when", ["plan", "load"])
def test_what_hangs_is_named_to_the_rank(ranks, others, service, when):
    """By who waited for it, although the step's own time is over as soon."""
    limit_s = service._timeout_s = 0.3
    real = others.plan

    def plan(split, position, ranks):
        time.sleep(0.2 if when == "load" else limit_s)
        if when == "plan":
            raise DataPlaneLost("the planner gave no answer")
        return real(split, position, ranks)

    def load(source, loaders, wanted):
        time.sleep(limit_s)
        raise DataPlaneLost("source 'web' gave no tokens")

    others.plan, others.load = plan, load
    with pytest.raises(DataPlaneLost, match="gave no (tokens|answer)") as caught:
        ranks(Reader(0, V)).get(Position())
    folder = service._segments.path.parent  # the node's, too
    assert str(caught.value).endswith(f"; its log is {folder}/log")
    assert (folder / LOST).read_text() in str(caught.value)  # so that the log stays
