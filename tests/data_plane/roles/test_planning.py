"""A planner answers what the ranks' own loaders would have drawn and planned, whoever it is."""

import pickle
import threading
from dataclasses import replace

import numpy as np
import pytest

from megatron_hdp.data.mixture import BatchSize, Position
from megatron_hdp.data.steps import Reader
from megatron_hdp.data_plane.roles import Answer, FencedError
from megatron_hdp.planner.online import Corrections, SeenCosts
from tests.support.node import until
from tests.support.rank_steps import differences, rank_steps
from tests.support.thread_plane import (
    local_steps,
    plan_settings,
    planner_of,
    planning_of,
    setup_of,
    without_time,
    write_pairs,
)

RANKS = range(4)


@pytest.fixture
def opened(tmp_path):
    """Make services, and close them in the end."""
    services = []

    def service(setup, folder=tmp_path, steps_ahead=2, planner=None):
        services.append(planning_of(setup, folder, steps_ahead, planner))
        return services[-1]

    yield service
    for one in services:
        one.close()


def answers(service, count, position=None):
    """Return what all ranks hear of some steps, one after another."""
    found, position = [], position or Position()
    for _ in range(count):
        found.append(service.answer(position, RANKS))
        position = found[-1].totals.after
    return found


def told(answer):
    """Return of an answer what a rank trains by."""
    return replace(answer.totals, planning_ms=0.0), tuple(answer.shares)


def require_same(ones, others):
    for one, other in zip(ones, others, strict=True):
        assert differences(told(one), told(other)) == []


def fail_once(planner, monkeypatch, at_step):
    """Let the strategy fail the first time that it plans a step."""
    real, failed = planner.balance, []
    lengths = planner.mix(at_step).lengths

    def plan(found, strategy=None, settings=None):
        if strategy is None and not failed and np.array_equal(found, lengths):
            failed.append(True)
            raise RuntimeError("no plan today")
        return real(found, strategy, settings)

    monkeypatch.setattr(planner, "balance", plan)


def test_the_answers_are_the_steps_of_local_loaders(setup, corpus, opened):
    found = answers(opened(setup), 6)
    for rank in RANKS:
        expected = local_steps(corpus, setup.settings, Reader(rank, 10**6), 6)
        for answer, step in zip(found, expected, strict=True):
            assert differences(told(answer)[0], without_time(step).totals) == []
            assert differences(answer.shares[rank], step.share) == []
            assert answer.epoch == 1
            assert answer.loaders == {name: (f"{name}-0",) for name in corpus.names}
            assert answer.num_serving == dict.fromkeys(corpus.names, 1)


def test_what_ranks_have_learnt_reaches_the_plan(setup, opened, tmp_path):
    """A planner that takes over decides the same, from what ranks ask with."""
    learnt = Corrections(linear_factor=2.0, speeds=((1, 0.25),))
    service, planner = opened(setup), planner_of(setup)
    position, plain = Position(), answers(opened(setup, tmp_path / "another"), 8)
    for step in range(8):
        costs = SeenCosts(4, step, ((1, learnt),) if step > 1 else ())
        asked = Position.from_record(replace(position, costs=costs).to_record())
        if step == 6:
            service = opened(setup)
        answer = service.answer(asked, RANKS)
        assert answer.totals.fingerprints["plan"] == planner.plan(asked).plan.fingerprint()
        follows = answer.totals.fingerprints["plan"] != plain[step].totals.fingerprints["plan"]
        assert follows == (step >= 5)  # of what was found behind step 1, four steps later
        position = answer.totals.after


def test_steps_are_decided_before_they_are_asked_for(setup, opened, monkeypatch):
    planner = planner_of(setup)
    asked, real = [], planner.plan
    monkeypatch.setattr(planner, "plan", lambda at: asked.append(at.steps) or real(at))
    service = opened(setup, steps_ahead=3, planner=planner)
    assert service.num_ahead == 0
    first = service.answer(Position(), RANKS)
    until(lambda: service.num_ahead == 3)
    assert asked == [0, 1, 2, 3]
    for rank in range(4):  # nodes ask for the same
        service.answer(first.totals.after, [rank])
    until(lambda: service.num_ahead == 3)  # what was asked for is kept, and is not ahead
    assert asked == [0, 1, 2, 3, 4]


def test_a_planner_that_was_restarted_decides_the_same(setup, opened):
    before = answers(opened(setup), 5)
    after = opened(setup)
    require_same(answers(after, 8)[:5], before)
    assert after.answer(Position(), [0]).epoch == 2


def test_data_that_changed_are_refused(tmp_path, opened):
    path = write_pairs(tmp_path)
    setup = setup_of(path)
    answers(opened(setup, steps_ahead=0), 2)
    lengths = {"web": [31, 4, 60] * 50, "chat": [12, 40], "code": [99, 7, 90]}
    changed = setup_of(write_pairs(tmp_path, lengths))
    service = opened(changed)
    found = "found {'sequences of the step'.* expected {'sequences of the step'"
    with pytest.raises(ValueError, match=f"step 1 .*{found}.*restore"):
        service.answer(Position(), RANKS)


@pytest.mark.parametrize("who", ["restarted", "same"])
def test_a_step_that_was_planned_statically_stays_static(setup, opened, monkeypatch, tmp_path, who):
    planner, folder = planner_of(setup), tmp_path / "of what fails"
    at = answers(opened(setup, steps_ahead=0), 2)[-1].totals.after
    fail_once(planner, monkeypatch, at)
    service = opened(setup, folder, steps_ahead=0, planner=planner)
    before = answers(service, 12)
    assert [answer.totals.failure for answer in before[:4]] == [
        *(None, None, "RuntimeError: no plan today", None)
    ]
    if who == "restarted":
        service = opened(setup, folder)
    require_same(answers(service, 12), before)


def test_a_mistake_reaches_who_asked_and_stops_no_other_step(setup, opened, monkeypatch):
    planner = planner_of(setup)
    good = answers(opened(setup, steps_ahead=0), 4)
    real, second = planner.plan, good[0].totals.after

    def step(position):
        if position == second:
            raise ValueError("found no token with loss")
        return real(position)

    monkeypatch.setattr(planner, "plan", step)
    service = opened(setup, planner=planner)
    require_same([service.answer(Position(), RANKS)], good[:1])
    for _ in range(2):
        with pytest.raises(ValueError, match="no token with loss"):
            service.answer(second, RANKS)
    require_same(answers(service, 2, good[1].totals.after), good[2:])


def test_the_end_of_all_sources_is_told_when_it_is_reached(tmp_path, opened):
    more = "schedule: [{from: 0, weights: {web: 1}}]"
    path = write_pairs(tmp_path, {"web": [30, 20, 9]}, more=more)
    path.write_text(path.read_text().replace("corpus}", "corpus, max-epochs: 1}"))
    service = opened(setup_of(path, plan_settings(batch=BatchSize(sequences=2))), steps_ahead=4)
    found = answers(service, 2)
    assert [one.totals.sequences for one in found] == [2, 1]
    with pytest.raises(ValueError, match="every source of the data has ended"):
        service.answer(found[-1].totals.after, RANKS)
    assert service.answer(Position(), RANKS).totals.sequences == 2


def test_nothing_is_answered_before_it_is_on_the_disk(setup, opened, tmp_path, monkeypatch):
    service = opened(setup, steps_ahead=0)
    journal, may_write = service._journal, threading.Event()
    real = journal.append
    monkeypatch.setattr(journal, "append", lambda one: may_write.wait(30) and real(one))
    found = []
    asking = threading.Thread(target=lambda: found.append(service.answer(Position(), RANKS)))
    asking.start()
    asking.join(0.3)
    assert not found and journal.entries() == []
    may_write.set()
    asking.join()
    (entry,) = journal.entries()
    assert entry.fingerprints == found[0].totals.fingerprints
    assert Position.from_record(entry.after) == found[0].totals.after

    def full(one):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal, "append", full)
    with pytest.raises(OSError, match="No space left"):
        service.answer(found[0].totals.after, RANKS)


def test_a_planner_that_was_replaced_does_not_answer_what_it_knows(setup, opened):
    old = opened(setup)
    first = old.answer(Position(), RANKS)
    new = opened(setup)
    with pytest.raises(FencedError):
        old.answer(Position(), RANKS)
    require_same([new.answer(Position(), RANKS)], [first])


def test_what_is_answered_arrives_as_it_was_sent_and_no_larger_than_its_shares():
    steps = rank_steps([40, 7, 90, 300, 8, 8, 8, 120] * 8, ranks=8, tokens_per_rank=512)
    serving = {"pages": ("first", "second"), "böcker": ("third",)}
    shares = [one.share for one in steps]
    answer = Answer(3, steps[0].totals, shares, serving, {"pages": 2, "böcker": 1})
    message = pickle.dumps(answer, protocol=5)
    values = [value for one in shares for value in vars(one).values()]
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    assert len(message) < sum(one.nbytes for one in arrays)
    found = pickle.loads(message)
    assert replace(found, shares=[]) == replace(answer, shares=[])
    for one, other in zip(found.shares, shares, strict=True):
        assert differences(one, other) == []
