"""A constructor's questions: another loader when one dies or hangs, one message when all have."""

import pickle
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from megatron_hdp.data_plane import asker as asker_module
from megatron_hdp.data_plane.asker import Asker, SourceLost
from megatron_hdp.data_plane.roles import FAILURES, FencedError, why_of
from megatron_hdp.data_plane.wire import DataPlaneLost

DEAD = RayActorError()
HANGS = object()


def said(error):
    """What Ray raises where an actor has raised `error`."""
    return RayTaskError("load", "traceback", error).as_instanceof_cause()


class Actor:
    """Gives one answer after another, the last of them for ever; exceptions are raised."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []
        self.load = self.answer = SimpleNamespace(remote=self._remote)

    def _remote(self, *arguments):
        self.asked.append(arguments)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture
def plane(monkeypatch):
    """Make an asker of these actors; what is not there was never started."""

    def get(answer, timeout):
        if answer is HANGS:
            time.sleep(timeout)
            raise GetTimeoutError("no answer yet")
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(asker_module.ray, "get", get)
    monkeypatch.setattr(asker_module, "_PAUSE_S", 0.01)

    def make(timeout_s=1.0, **actors):
        def find(name):
            if name not in actors:
                raise ValueError(f"Failed to look up actor with name '{name}'.")
            return actors[name]

        return Asker(timeout_s, find)

    return make


def test_the_first_loader_is_asked_alone(plane):
    a, b = Actor("tokens"), Actor("others")
    asker = plane(a=a, b=b)
    assert asker.load("web", ("a", "b"), "wanted") == "tokens"
    assert (a.asked, b.asked) == ([("web", "wanted")], [])
    assert (asker.num_takeovers, asker.longest_takeover_s) == (0, 0.0)


@pytest.mark.parametrize("first", [DEAD, said(FencedError("replaced")), "not there"])
def test_the_next_one_takes_over_at_once(plane, first):
    actors = {"b": Actor("tokens")} | ({} if first == "not there" else {"a": Actor(first)})
    asker = plane(timeout_s=60.0, **actors)
    assert asker.load("web", ("a", "b"), "wanted") == "tokens"
    assert asker.num_takeovers == 1
    assert asker.longest_takeover_s > 0


def test_one_that_hangs_is_left_after_its_share_of_the_time(plane):
    asker = plane(timeout_s=1.5, a=Actor(HANGS), b=Actor(HANGS), c=Actor("tokens"))
    began = time.monotonic()
    assert asker.load("web", ("a", "b", "c"), "wanted") == "tokens"
    assert 0.9 < asker.longest_takeover_s <= time.monotonic() - began
    assert asker.num_takeovers == 1


def test_one_that_is_being_started_is_waited_for(plane):
    a = Actor(DEAD, DEAD, DEAD, "tokens")
    asker = plane(timeout_s=30.0, a=a)
    assert asker.load("web", ("a",), "wanted") == "tokens"
    assert len(a.asked) == 4


@pytest.mark.parametrize(
    ("actors", "timeout_s", "why"),
    [
        ({"a": DEAD, "b": DEAD}, 0.3, r"within 0 s \(The actor experienced an error"),
        ({"a": HANGS, "b": HANGS}, 1.0, r"within 1 s \(b has not answered for 0 s\)|\(b has"),
        ({}, 0.05, r"within 0 s \(it has none\)"),
    ],
    ids=["all dead", "all hang", "no loader"],
)
def test_a_source_that_gives_nothing_is_named(plane, actors, timeout_s, why):
    loaders = {name: Actor(answer) for name, answer in actors.items()}
    asker = plane(timeout_s=timeout_s, **loaders)
    began = time.monotonic()
    with pytest.raises(SourceLost, match=f"source 'web' gave no tokens {why}") as caught:
        asker.load("web", tuple(loaders), "wanted")
    assert time.monotonic() - began > 0.8 * timeout_s
    asked = [len(one.asked) for one in loaders.values()]
    assert not asked or (min(asked) and max(asked) - min(asked) <= 1)
    assert "look at its files and their disk, or raise timeout-s of loaders" in str(caught.value)


def test_a_silent_source_is_told_from_a_lost_planner(plane):
    asker = plane(timeout_s=0.3, a=Actor(DEAD))
    with pytest.raises(SourceLost) as caught:
        asker.load("web", ("a",), "wanted")
    assert caught.value.source == "web"
    assert why_of(caught.value).startswith("no tokens within 0 s: The actor experienced an error")
    again = pickle.loads(pickle.dumps(caught.value))  # a planner's travels to a constructor
    assert (again.source, str(again)) == ("web", str(caught.value))
    assert isinstance(again, FAILURES)
    with pytest.raises(DataPlaneLost) as caught:
        asker.ask("planner", "answer")
    assert not isinstance(caught.value, FAILURES)


@pytest.mark.parametrize("error", [ValueError("the file has changed"), KeyError("x")])
@pytest.mark.parametrize("whom", ["loader", "planner"])
def test_what_is_said_of_the_data_is_raised_as_it_is(plane, error, whom):
    a, b = Actor(said(error)), Actor("tokens")
    asker = plane(timeout_s=30.0, a=a, b=b)
    with pytest.raises(type(error)) as caught:
        asker.load("web", ("a", "b"), "wanted") if whom == "loader" else asker.ask("a", "load")
    assert caught.value is error
    assert len(a.asked) == 1 and b.asked == []  # it would say the same


def test_a_planner_that_is_being_started_is_waited_for(plane):
    planner = Actor(DEAD, said(FencedError("replaced")), "answer")
    assert plane(timeout_s=30.0, planner=planner).ask("planner", "answer", 1, 2) == "answer"
    assert planner.asked == [(1, 2)] * 3


@pytest.mark.parametrize(
    ("planner", "why"),
    [(DEAD, "actor experienced an error"), (HANGS, "does not answer"), (None, "Failed to look up")],
)
@pytest.mark.parametrize("limits", [(0.2, None), (60.0, 0.2)], ids=["usual", "of one question"])
def test_a_planner_that_stays_away_is_named(plane, planner, why, limits):
    actors = {} if planner is None else {"planner": Actor(planner)}
    asker = plane(timeout_s=limits[0], **actors)
    with pytest.raises(DataPlaneLost, match=f"planner .*'answer' within 0 s .*{why}") as caught:
        asker.ask("planner", "answer", timeout_s=limits[1])
    assert "expected one: raise timeout-s of loaders" in str(caught.value)
