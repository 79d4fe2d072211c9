"""A source that fails costs what was drawn of it already; planner and nodes go on without it."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from megatron_hdp.data.mixture import Position, TextSource
from megatron_hdp.data.steps import Reader
from megatron_hdp.data_plane.roles import (
    ConstructingService,
    LoadingService,
    PublishedSource,
    SourceSilent,
)
from tests.support.rank_steps import differences
from tests.support.thread_plane import (
    LENGTHS,
    Loaders,
    loading_of,
    local_steps,
    planner_of,
    planning_of,
    require_same,
    setup_of,
    without_time,
    write_notes,
    write_pairs,
)

V = 10**6
GO_ON = "on-failure: go-on-without"
NODES = ((0, 1), (2, 3))  # HDP ranks


class Silent(SourceSilent):
    why = "no tokens within 1 s: a has not\n answered"


class Plane:
    """A planner and the constructors of two nodes, each with two ranks."""

    def __init__(self, setup, services, folder, steps_ahead=1):
        self.setup, self.folder, self.steps_ahead = setup, folder, steps_ahead
        self.told, self.num_failures = [], 0
        self.fails = [{}, {}]
        """Of each node by source: what asking for its tokens raises."""
        self.loaders = [Loaders(services), Loaders(services)]
        self.planner, self.is_closed = None, False
        self.restart_planner()
        names = [one.name for one in setup.spec.sources]
        self.nodes = [
            ConstructingService(
                *(names, self._plan, partial(self._load, node)),
                *(lambda step: step, lambda step: None),
                steps_ahead=steps_ahead,
                may_fail=[one.name for one in setup.spec.sources if one.may_fail],
                tell_planner=partial(self._tell, node),
            )
            for node in range(len(NODES))
        ]
        self.readers = [[Reader(rank, V) for rank in ranks] for ranks in NODES]
        for service, readers in zip(self.nodes, self.readers, strict=True):
            for reader in readers:
                service.add(reader)

    def restart_planner(self):
        planner = self.planner
        self.planner = planning_of(self.setup, self.folder, self.steps_ahead)
        if planner is not None:
            planner.close()

    def steps(self, count, position=None):
        """What all four ranks get, step by step; they agree on what ranks compare."""
        found, position = [], position or Position()
        for _ in range(count):
            with ThreadPoolExecutor(4) as ranks:
                asked = [
                    ranks.submit(service.get, position, reader, 60.0)
                    for service, readers in zip(self.nodes, self.readers, strict=True)
                    for reader in readers
                ]
                of_ranks = [without_time(one.result()) for one in asked]
            first = of_ranks[0].totals
            for other in of_ranks:
                assert differences(other.totals, first) == []
            found.append(of_ranks)
            position = first.after
        return found

    def close(self):
        self.is_closed = True
        for one in (*self.nodes, self.planner):
            one.close()

    def _plan(self, position, ranks):
        while True:
            try:
                return self.planner.answer(position, ranks)
            except RuntimeError:  # another one takes over
                if self.is_closed:
                    raise
                time.sleep(0.01)

    def _load(self, node, source, loaders, wanted):
        loaded = self.loaders[node](source, loaders, wanted)
        if source in self.fails[node]:
            self.num_failures += 1
            raise self.fails[node][source]
        return loaded

    def _tell(self, node, source, why):
        self.told.append((node, source))
        self.planner.go_on_without(source, why)


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """Conversations may fail, web and code may not."""
    folder = tmp_path_factory.mktemp("sources")
    return setup_of(write_pairs(folder, keys={"chat": GO_ON}))


@pytest.fixture(scope="module")
def services(setup):
    return loading_of(setup)


@pytest.fixture
def plane(setup, services, tmp_path):
    """Make planes, and close them in the end."""
    made = []

    def make(of=setup, loading=services, **how):
        made.append(Plane(of, loading, tmp_path, **how))
        return made[-1]

    yield make
    for one in made:
        one.close()


def parted(steps):
    """Steps that were decided with all sources, and those without one."""
    return [one for one in steps if not one[0].totals.without], [
        one for one in steps if one[0].totals.without
    ]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (Silent(), "no tokens within 1 s: a has not answered"),
        (OSError(5, "Input/output error", "b\udcff.bin"), "[Errno 5] Input/output error: "),
        (ValueError("b.bin has changed"), "b.bin has changed"),
    ],
    ids=["silent", "disk", "changed"],
)
def test_one_node_cannot_read_and_both_go_on_without(plane, setup, error, why):
    one = plane()
    fine = one.steps(3)
    one.fails[0]["chat"] = error
    steps = one.steps(10, fine[-1][0].totals.after)
    told, later = parted(steps)
    assert 1 <= len(told) <= 6 and len(later) >= 4
    corpus, num_lost = planner_of(setup).corpus, 0
    expected = [local_steps(corpus, setup.settings, Reader(rank, V), 9) for rank in range(4)]
    for number, step in enumerate(told):
        for rank in (2, 3):  # who can read, reads
            assert not step[rank].lost
            require_same(step[rank], expected[rank][3 + number])
        for rank in (0, 1):  # the first may be whole: it was made before
            num_lost += require_lost(step[rank], expected[rank][3 + number], why)
    assert num_lost
    for step in later:
        assert step[0].totals.before.without == ("chat",)
        assert step[0].totals.without["chat"].startswith(why)
        assert step[0].totals.amounts.source_tokens[1] == 0
        assert not any(rank.lost for rank in step)
    assert one.num_failures == 1  # later steps do not wait for it
    assert set(one.told) == {(0, "chat")}
    assert one.planner.failed == later[0][0].totals.without


def require_lost(step, expected, why):
    """Hold a step against the one that was read whole; return how many sequences it lacks."""
    lost = {i for one in step.lost for i in one.ids}
    assert lost in (set(), set(step.share.ids[step.share.sources == 1].tolist()))
    for one in step.lost:
        assert one.name == "chat" and one.why.startswith(why) and one.ids
    for part, whole in zip(step.micro_batches, expected.micro_batches, strict=True):
        gone = [place for place, i in enumerate(part.sequence_ids) if i in lost]
        is_gone = np.isin(whole.sequence_index, gone)
        assert not part.tokens[is_gone].any() and not part.loss_mask[is_gone].any()
        for name in ("tokens", "labels", "loss_mask"):
            assert np.array_equal(getattr(part, name)[~is_gone], getattr(whole, name)[~is_gone])
        for name in ("positions", "sequence_index", "sequence_ids", "ring", "corrupt_ids"):
            assert np.array_equal(getattr(part, name), getattr(whole, name))
    return len(lost)


def test_later_steps_are_those_of_a_run_that_lacks_the_source(plane, setup, tmp_path):
    one = plane()
    position = one.steps(2)[-1][0].totals.after
    one.fails[1]["chat"] = Silent()
    _, later = parted(one.steps(30, position))
    only = "schedule: [{from: 0, weights: {web: 0.5, code: 0.3}}]"
    names, whole = ("web", "code"), ("web", "chat", "code")
    lacking = planner_of(
        setup_of(write_pairs(tmp_path, {name: LENGTHS[name] for name in names}, more=only))
    )
    lacking.follow({name: setup.orders[name] for name in names})
    at = later[0][0].totals.before
    at = replace(at, without=(), sources={name: at.of(name) for name in names})
    for step in later:
        expected = lacking.plan(at)
        shares = lacking.shares(expected).of(range(4))
        for rank, share in zip(step, shares, strict=True):
            mine = [whole[i] for i in rank.share.sources.tolist()]
            assert mine == [names[i] for i in share.sources.tolist()]
            assert differences(replace(rank.share, sources=share.sources), share) == []
        assert step[0].totals.amounts.loss_tokens == expected.step.num_loss_tokens.sum()
        at = expected.step.after
    assert len(later) > 20


def test_a_planner_that_takes_over_decides_the_same(plane, setup, tmp_path):
    one = plane()
    one.fails[0]["chat"] = Silent()
    steps = one.steps(12)
    told, later = parted(steps)
    assert told and later
    one.restart_planner()
    assert one.planner.failed == {"chat": "no tokens within 1 s: a has not answered"}
    asked = [Position(), *(step[0].totals.after for step in steps[:-1])]
    for at, step in zip(asked, steps, strict=True):  # from the journal, with and without
        totals = without_totals(one.planner.answer(at, [0]).totals)
        assert differences(totals, step[0].totals) == []
    (further,) = one.steps(1, steps[-1][0].totals.after)
    assert further[0].totals.before.without == ("chat",)


def test_a_planner_that_died_before_it_decided_hears_again(plane, tmp_path):
    """The first one heard of the failure and wrote nothing."""
    one = plane(steps_ahead=4)
    one.fails[0]["chat"] = Silent()
    heard = iter([lambda *_: None])  # the first time, nobody
    one.nodes[0]._tell_planner = lambda *told: next(heard, partial(one._tell, 0))(*told)
    _, later = parted(one.steps(14))
    assert later


def test_a_source_without_the_policy_ends_the_job(plane):
    one = plane()
    one.fails[0]["web"] = OSError(5, "Input/output error")
    with pytest.raises(OSError, match="Input/output error"):
        one.steps(1)
    with pytest.raises(ValueError, match="found the source 'web', expected one with .*: chat"):
        one.planner.go_on_without("web", "because")


@pytest.mark.parametrize("bug", [TypeError("a bug"), RuntimeError("one more")])
def test_a_bug_is_no_failure_of_a_source(plane, bug):
    one = plane()
    one.fails[1]["chat"] = bug
    with pytest.raises(type(bug), match=str(bug)):
        one.steps(6)


def test_when_no_source_is_left_the_reasons_are_named(plane, tmp_path):
    path = write_pairs(
        tmp_path,
        {"web": [30, 3, 64] * 9, "chat": [12, 40]},
        more="",
        keys={"web": GO_ON, "chat": GO_ON},
    )
    setup = setup_of(path)
    one = plane(setup, loading_of(setup))
    position = one.steps(1)[0][0].totals.after
    one.fails[0] |= {"web": Silent(), "chat": ValueError("chat.bin was cut")}
    with pytest.raises(ValueError, match="every source .* has ended: no step is left.*") as caught:
        one.steps(12, position)
    assert "source 'web': no tokens within 1 s" in str(caught.value)
    assert "source 'chat': chat.bin was cut" in str(caught.value)


def test_two_sources_fail_at_different_times(plane, setup, tmp_path):
    setup = setup_of(write_pairs(tmp_path, keys={"chat": GO_ON, "code": GO_ON}))
    one = plane(setup, loading_of(setup))
    one.fails[0]["chat"] = Silent()
    steps = one.steps(10)
    assert steps[-1][0].totals.before.without == ("chat",)
    one.fails[1]["code"] = ValueError("cut")
    steps = one.steps(10, steps[-1][0].totals.after)
    assert steps[-1][0].totals.before.without == ("chat", "code")
    assert set(steps[-1][0].totals.without) == {"chat", "code"}
    assert set(one.told) == {(0, "chat"), (1, "code")}


class Notes:
    """Text on the fly, of which a planner hears lengths from loaders."""

    def __init__(self, folder, policy=GO_ON):
        write_pairs(folder)
        path = write_notes(folder, 300, range(1, 21), f", {policy}")
        self.setup = setup_of(path)
        self.services = loading_of(self.setup)
        self.error, self.num_asked = None, 0
        self.askers = ThreadPoolExecutor(4)

    def service(self, folder):
        planner = self.setup.planner(lambda text: None, self._published)
        return planning_of(self.setup, folder, planner=planner)

    def _published(self, source):
        if not isinstance(source, TextSource):
            return source

        def ask(turn, method, arguments):
            self.num_asked += 1
            if self.error is not None:
                raise self.error
            return getattr(self.services[source.name], method)(*arguments)

        return PublishedSource.of(source, ask, lambda: 2, self.askers)


def test_text_whose_lengths_nobody_says_is_dropped_by_the_planner(tmp_path):
    notes = Notes(tmp_path)
    assert isinstance(notes.services["notes"], LoadingService)
    service = notes.service(tmp_path)
    with_it = service.answer(Position(), [0]).totals
    assert with_it.amounts.source_tokens[0] > 0
    notes.error = Silent()
    without = service.answer(with_it.after, [0]).totals
    assert without.before == replace(with_it.after, without=("notes",))
    assert without.without == {"notes": "no tokens within 1 s: a has not answered"}
    assert without.amounts.source_tokens[0] == 0 and without.sequences == 12
    asked = notes.num_asked
    later = service.answer(without.after, [0]).totals
    assert notes.num_asked == asked  # nobody waits for it again
    service.close()
    again = notes.service(tmp_path)  # after a restart, though nobody says lengths
    for at, expected in ((with_it.after, without), (without.after, later)):
        found = again.answer(at, [0]).totals
        assert differences(without_totals(found), without_totals(expected)) == []
    # a step that nobody can make any more as it was, such as an evaluation's first one
    assert again.answer(Position(), [0]).totals.before.without == ("notes",)
    again.close()


def without_totals(totals):
    return replace(totals, planning_ms=0.0)


def test_text_without_the_policy_ends_the_job(tmp_path):
    notes = Notes(tmp_path, policy="on-failure: error")
    service = notes.service(tmp_path)
    notes.error = Silent()
    with pytest.raises(Silent):
        service.answer(Position(), [0])
    service.close()


def test_a_plan_is_made_again_from_what_ranks_know(plane, setup):
    """As ranks do, to draw it."""
    one = plane()
    one.fails[0]["chat"] = Silent()
    _, later = parted(one.steps(10))
    totals = later[-1][0].totals
    assert planner_of(setup).plan(totals.before).plan.fingerprint() == totals.fingerprints["plan"]
    assert without_time(later[-1][0]).totals.before.without
