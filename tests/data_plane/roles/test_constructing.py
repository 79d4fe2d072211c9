"""A constructor's steps are those of local loaders, to the bit, whatever comes when from where."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.data.mixture import Position
from megatron_hdp.data.steps import Reader, StepPlanner, pieces_of
from megatron_hdp.data_plane.roles import ConstructingService
from tests.support.examples import some
from tests.support.node import until
from tests.support.thread_plane import Loaders, Planner, local_steps, plan_settings, require_same

V = 10**6
WAIT_S = 60.0
examples = settings(max_examples=some(25))
readers = st.builds(
    Reader,
    hdp_rank=st.integers(0, 4),
    vocab_size=st.sampled_from([200, V]),  # of 257 ids
    reads_tokens=st.booleans(),
    reads_mask=st.booleans(),
    token_multiple=st.sampled_from([1, 4]),
)


class Laid:
    """What was laid out: each once, and let go once."""

    def __init__(self):
        self.lock = threading.Lock()
        self.out, self.gone = [], Counter()

    def lay_out(self, step):
        with self.lock:
            self.out.append(step)
        return step

    def let_go(self, step):
        with self.lock:
            self.gone[id(step)] += 1

    def is_gone(self, step):
        return self.gone[id(step)] == 1

    def require_all_gone(self):
        until(lambda: len(self.gone) == len(self.out))
        assert set(self.gone.values()) <= {1}


class Made:
    """A constructor over a split's services, and what was asked of the others."""

    def __init__(self, corpus, services, settings, *, delays_ms=(0,), steps_ahead=2, **planner):
        self.planner = Planner(StepPlanner(corpus, settings), **planner)
        self.loaders, self.laid = Loaders(services, delays_ms), Laid()
        self.service = ConstructingService(
            corpus.names,
            self.planner,
            self.loaders,
            self.laid.lay_out,
            self.laid.let_go,
            steps_ahead=steps_ahead,
        )

    def get(self, position, reader):
        return self.service.get(position, reader, WAIT_S)

    def steps(self, reader, count):
        """What a rank does: the next step is asked for when it has one."""
        self.service.add(reader)
        found, position = [], Position()
        for _ in range(count):
            found.append(self.get(position, reader))
            position = found[-1].totals.after
        return found


@pytest.fixture
def made(corpus, services):
    """Make constructors, and close them in the end."""
    all_made = []

    def make(settings=None, **how):
        all_made.append(Made(corpus, services, settings or plan_settings(), **how))
        return all_made[-1]

    yield make
    for one in all_made:
        one.service.close()


def first(corpus, reader, count, settings=None):
    return local_steps(corpus, settings or plan_settings(), reader, count)


@examples
@given(
    of_node=st.lists(readers, min_size=1, max_size=7),
    num_loaders=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    num_shadows=st.integers(0, 2),
    delays_ms=st.lists(st.sampled_from([0, 0, 1, 4]), min_size=1, max_size=7),
    lockstep=st.sampled_from([(1, 1), (2, 1), (1, 5)]),
    steps_ahead=st.integers(0, 3),
)
def test_any_readers_get_their_own_steps(
    corpus, services, of_node, num_loaders, num_shadows, delays_ms, lockstep, steps_ahead
):
    """Also when loaders come and go between steps."""
    num_stages, lockstep_ranks = lockstep
    of_run = plan_settings(num_ranks=5, num_stages=num_stages, lockstep_ranks=lockstep_ranks)
    one = Made(
        *(corpus, services, of_run),
        delays_ms=delays_ms,
        steps_ahead=steps_ahead,
        num_loaders=num_loaders,
        num_shadows=num_shadows,
    )
    with ThreadPoolExecutor(len(of_node)) as ranks:  # they come when they come
        found = list(ranks.map(lambda reader: one.steps(reader, 4), of_node))
    for reader, steps in zip(of_node, found, strict=True):
        for step, expected in zip(steps, _expected(corpus, of_run, reader, 4), strict=True):
            require_same(step, expected)
    one.service.close()
    one.laid.require_all_gone()


@cache
def _expected(corpus, of_run, reader, count):
    return local_steps(corpus, of_run, reader, count)


@pytest.mark.parametrize("num_loaders", [(1,), (3, 1)])
def test_each_piece_is_fetched_once_and_nothing_else(made, corpus, num_loaders):
    """Of a node with tensor-parallel ranks and pipeline stages."""
    one = made(steps_ahead=0, num_loaders=num_loaders)
    node = [
        Reader(0, V, reads_mask=False),
        Reader(0, V),
        Reader(2, V),
        Reader(1, V, reads_tokens=False, reads_mask=False),
    ]
    for reader in node:
        one.service.add(reader)
    position, held = Position(), Counter()
    for step in first(corpus, node[1], 5):
        for reader in node:
            one.get(position, reader)
        planner = StepPlanner(corpus, plan_settings())
        planned = planner.plan(position)
        for share in planner.shares(planned).of([0, 2]):
            of_rank = pieces_of(share)
            columns = (of_rank.sources, of_rank.rows, of_rank.starts, of_rank.counts)
            for source, *piece in zip(*(column.tolist() for column in columns), strict=True):
                held[corpus.names[source], *piece] += 1
        position = step.totals.after
    fetched = Counter(
        (source, *piece)
        for source, _, wanted in one.loaders.asked
        for piece in zip(
            *(getattr(wanted, name).tolist() for name in ("rows", "starts", "counts")), strict=True
        )
    )
    assert fetched == held
    assert sum(piece[-1] for piece in fetched) > 300


def test_a_node_fetches_little_more_than_its_slices(made, corpus):
    one = made(steps_ahead=0, num_loaders=(2,))
    for rank in range(2):
        one.steps(Reader(rank, V), 8)
    wanted = sum(wanted.num_tokens for _, _, wanted in one.loaders.asked)
    held = 2 * wanted  # ids below 2**16
    assert held <= one.service.figures.fetched_bytes <= 1.1 * held


def test_loaders_share_the_rows_and_those_that_stand_by_come_last(made):
    one = made(steps_ahead=0, num_loaders=(3,), num_shadows=1)
    one.steps(Reader(0, V), 12)
    of_web = [loaders for source, loaders, _ in one.loaders.asked if source == "web"]
    assert {loaders[0] for loaders in of_web} == {"web-0", "web-1", "web-2"}
    assert all(sorted(loaders) == [f"web-{i}" for i in range(4)] for loaders in of_web)
    rows = {loaders[0]: set() for loaders in of_web}
    for source, loaders, wanted in one.loaders.asked:
        if source == "web":
            rows[loaders[0]] |= set(wanted.rows.tolist())
    assert not rows["web-0"] & rows["web-1"]
    assert one.service.num_loaders == 3 * 4


def test_a_constructor_that_was_restarted_makes_the_same_steps(made, corpus):
    reader = Reader(1, V)
    expected = first(corpus, reader, 6)
    before = made()
    before.steps(reader, 3)
    before.service.close()
    after = made(num_loaders=(4,))
    after.service.add(reader)
    for at in (2, 3, 4):  # it asks again for what it has not trained
        position = expected[at].totals.before
        require_same(after.get(position, reader), expected[at])


def test_a_reader_that_comes_while_others_wait_disturbs_none(made, corpus):
    one = made(delays_ms=[30])
    node = [Reader(rank % 4, V, token_multiple=1 + rank // 4) for rank in range(8)]

    def comes_late(reader):
        time.sleep(0.005 * node.index(reader))
        return one.steps(reader, 2)

    with ThreadPoolExecutor(len(node)) as ranks:
        found = list(ranks.map(comes_late, node))
    for reader, steps in zip(node, found, strict=True):
        for step, expected in zip(steps, first(corpus, reader, 2), strict=True):
            require_same(step, expected)


def test_what_a_rank_is_given_is_not_let_go_already(made, corpus):
    """Of a step that was dropped while it was made, the rank gets the next making."""
    one = made(delays_ms=[100], steps_ahead=0)
    slow, fast = Reader(0, V), Reader(1, V)
    expected = first(corpus, slow, 3)
    with ThreadPoolExecutor(3) as ranks:
        asked = ranks.submit(one.get, Position(), slow)
        until(lambda: one.loaders.asked)
        others = [ranks.submit(one.get, step.totals.before, fast) for step in expected[1:]]
        step = asked.result()
        assert not one.laid.gone[id(step)]
        require_same(step, expected[0])
        assert [other.result().totals.before.steps for other in others] == [1, 2]


def test_a_step_that_comes_too_late_is_let_go_all_the_same(made):
    one = made(delays_ms=[200], steps_ahead=0)
    one.service.add(Reader(0, V))
    with pytest.raises(TimeoutError, match=r"step 1 .* 0\.05 s"):
        one.service.get(Position(), Reader(0, V), 0.05)
    step = one.get(Position(), Reader(0, V))
    assert one.laid.out == [step]  # the same making
    one.service.close()
    one.laid.require_all_gone()


def test_a_reader_that_was_taken_out_is_made_nothing_for(made, corpus):
    one = made(steps_ahead=0)
    steps = one.steps(Reader(0, V), 1)
    one.service.add(Reader(1, V))
    one.service.remove(Reader(1, V))
    one.get(steps[0].totals.after, Reader(0, V))
    assert one.planner.asked[-1] == (1, (0,))
    late = one.get(steps[0].totals.after, Reader(1, V))  # it is there all the same
    require_same(late, first(corpus, Reader(1, V), 2)[1])


def test_steps_are_dropped_in_order_and_let_go_once(made):
    one = made(steps_ahead=1)
    steps = one.steps(Reader(0, V), 6)
    until(lambda: len(one.laid.out) == 7)
    kept = [step for step in one.laid.out if not one.laid.is_gone(step)]
    assert [step.totals.before.steps for step in kept] == [4, 5, 6]
    assert [one.laid.is_gone(step) for step in steps] == [True] * 4 + [False] * 2
    one.service.close()
    one.laid.require_all_gone()


def test_so_many_steps_are_made_ahead(made):
    one = made(steps_ahead=3)
    reader = Reader(0, V)
    (step,) = one.steps(reader, 1)
    until(lambda: one.service.num_ahead == 3)
    assert [at for at, _ in one.planner.asked] == [0, 1, 2, 3]
    one.get(step.totals.after, reader)
    until(lambda: len(one.laid.out) == 5)
    assert [at for at, _ in one.planner.asked] == [0, 1, 2, 3, 4]


def test_a_slow_reader_is_served_after_its_step_was_dropped(made, corpus):
    one = made(steps_ahead=1)
    slow, fast = Reader(2, V), Reader(0, V)
    one.service.add(slow)
    one.steps(fast, 6)
    require_same(one.get(Position(), slow), first(corpus, slow, 1)[0])


def test_a_planner_that_was_replaced_is_not_believed(made, corpus):
    one = made(steps_ahead=0)
    reader = Reader(0, V)
    one.planner.epoch = 3
    (step,) = one.steps(reader, 1)
    one.planner.epoch = 2
    with pytest.raises(RuntimeError, match="a planner of epoch 2 has answered, expected 3"):
        one.get(step.totals.after, reader)
    real, epochs = one.service._ask_planner, iter([2, 4])
    one.service._ask_planner = lambda *asked: replace(real(*asked), epoch=next(epochs))
    after = one.get(step.totals.after, reader)
    assert next(epochs, None) is None  # it asked until the new one answered
    require_same(after, first(corpus, reader, 2)[1])


@pytest.mark.parametrize("who", ["planner", "loaders"])
def test_a_mistake_is_told_to_all_who_ask_and_the_next_step_goes_on(made, corpus, who):
    one = made()
    expected = first(corpus, Reader(0, V), 3)
    bad, real = expected[1].totals.before, (one.service._ask_planner, one.service._ask_loader)

    def planner(position, ranks):
        if position == bad and who == "planner":
            raise ValueError("found no token with loss")
        return real[0](position, ranks)

    def loader(source, loaders, wanted):
        if one.planner.asked[-1][0] == 1 and who == "loaders":
            raise ValueError("the file has changed")
        return real[1](source, loaders, wanted)

    one.service._ask_planner, one.service._ask_loader = planner, loader
    for reader in (Reader(0, V), Reader(1, V)):
        one.steps(reader, 1)
    for reader in (Reader(0, V), Reader(1, V)):
        with pytest.raises(ValueError, match="no token with loss|file has changed"):
            one.get(bad, reader)
    require_same(one.get(expected[2].totals.before, Reader(0, V)), expected[2])


def test_a_loader_that_sends_too_little_is_found(made):
    one = made(steps_ahead=0)
    real = one.service._ask_loader

    def short(source, loaders, wanted):
        loaded = real(source, loaders, wanted)
        return replace(loaded, tokens=loaded.tokens[:-1])

    one.service._ask_loader = short
    with pytest.raises(RuntimeError, match=r"a loader sent [\d,]+ tokens, expected"):
        one.steps(Reader(0, V), 1)


def test_a_step_that_failed_is_made_when_it_is_asked_for_again(made, corpus):
    one = made(steps_ahead=0)
    real, told = one.service._ask_loader, iter([RuntimeError("no loader lives")])

    def fails_once(*asked):
        for error in told:
            raise error
        return real(*asked)

    one.service._ask_loader = fails_once
    with pytest.raises(RuntimeError, match="no loader lives"):
        one.steps(Reader(0, V), 1)
    assert one.service.num_ahead == 0
    require_same(one.get(Position(), Reader(0, V)), first(corpus, Reader(0, V), 1)[0])


def test_closing_while_steps_are_made_leaves_nothing(made, caplog):
    one = made(delays_ms=[50], steps_ahead=3)
    with ThreadPoolExecutor(2) as ranks:
        asked = ranks.submit(one.steps, Reader(0, V), 1)
        until(lambda: one.loaders.asked)
        others = ranks.submit(one.steps, Reader(1, V), 1)
        until(lambda: one.service.num_readers == 2)
        one.service.close()
        being_made = asked.exception()  # refused if a part of it had not been asked for yet
        assert being_made is None or "after shutdown" in str(being_made)
        with pytest.raises(RuntimeError, match="nothing more is made|after shutdown"):
            others.result()
    one.service._makers.shutdown(wait=True)
    one.laid.require_all_gone()
    assert caplog.messages == []


def test_masks_of_conversations_travel(made, corpus):
    """The loss masks of this data are not all ones, else the tests above would see nothing."""
    steps = made().steps(Reader(0, V), 6)
    masks = np.concatenate([part.loss_mask for step in steps for part in step.micro_batches])
    assert 0 < masks.sum() < len(masks)


def test_a_step_that_is_waited_for_names_who_gave_its_tokens_last(made, services, corpus):
    """What was made before it is asked for is nobody's fault."""
    one, reader = made(), Reader(0, V)
    load = one.loaders

    def slow(source, loaders, wanted):
        time.sleep(0.3 if source == corpus.names[1] else 0)
        return load(source, loaders, wanted)

    one.service._ask_loader = slow
    found = one.steps(reader, 4)
    names = [{corpus.names[i] for i in step.share.sources} for step in found]
    assert any(corpus.names[1] in some for some in names)
    waited_for = dict(one.service.figures.waited_for)
    assert max(waited_for, key=waited_for.__getitem__) == corpus.names[1]
    position = found[-1].totals.after
    until(lambda: any(step.totals.before == position for step in one.laid.out))
    time.sleep(0.1)  # from laid out to made
    one.get(position, reader)
    assert one.service.figures.waited_for == waited_for
