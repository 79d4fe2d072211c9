"""A mixture that follows the loss draws the same steps here and there, however far ahead."""

from dataclasses import replace

import pytest

from megatron_hdp.data.mixture import Position, SeenLosses
from megatron_hdp.data.one_ahead import OneAhead
from megatron_hdp.data.steps import LocalLoaders, Reader
from megatron_hdp.data_plane.roles import ConstructingService
from tests.support.node import until
from tests.support.thread_plane import (
    WEIGHTS,
    Loaders,
    loading_of,
    plan_settings,
    planner_of,
    planning_of,
    require_same,
    setup_of,
    write_pairs,
)

RECIPE = """
def mix(weights, position, losses):
    return {name: weight + sum(one.get(name, 0) for one in losses)
            for name, weight in weights.items()}
"""
STEPS = 12


@pytest.fixture
def setup(tmp_path):
    (tmp_path / "recipe.py").write_text(RECIPE)

    def made(behind):
        more = f"{WEIGHTS}\nprimitives: {{mix: recipe.py:mix, losses-behind: {behind}}}"
        return setup_of(
            write_pairs(tmp_path, more=more), plan_settings(num_ranks=1, tokens_per_rank=128)
        )

    return made


def trained(loaders, behind, count=STEPS):
    """Steps as a rank runs them: the next is expected while one runs, losses come behind it."""
    names, found = ("web", "chat", "code"), []
    position = Position(losses=SeenLosses(behind))
    for _ in range(count):
        step = loaders.get(position)
        found.append(step)
        loaders.expect(replace(step.totals.after, losses=position.losses))
        tokens = step.totals.amounts.source_tokens
        losses = {name: number / 7 for name, number in zip(names, tokens, strict=True)}
        seen = position.losses.with_step(position.steps, losses)
        position = replace(step.totals.after, losses=seen)
    return found


def without_losses(step):
    """A step without what was known when it was decided, which may be more or less."""
    borders = {
        name: replace(getattr(step.totals, name), losses=None) for name in ("before", "after")
    }
    return replace(step, totals=replace(step.totals, **borders))


class ThreadLoaders:
    """The loaders of a rank, over a constructor and a planner in this process."""

    def __init__(self, setup, folder, steps_ahead):
        self.planning = planning_of(setup, folder, steps_ahead)
        reader = Reader(0, 10**6)
        self.service = ConstructingService(
            *([one.name for one in setup.spec.sources], self.planning.answer),
            *(Loaders(loading_of(setup)), lambda step: step, lambda step: None),
            steps_ahead=steps_ahead,
        )
        self.service.add(reader)
        ahead = OneAhead(lambda position: self.service.get(position, reader, 30), Position.key)
        self.get, self.expect, self._end = ahead.get, ahead.expect, ahead.close

    def close(self):
        self.service.close()
        self._end()
        self.planning.close()


@pytest.mark.parametrize(("behind", "steps_ahead"), [(2, 0), (2, 3), (4, 1), (9, 3)])
def test_steps_are_those_of_local_loaders(setup, tmp_path, behind, steps_ahead):
    of_run = setup(behind)
    local = LocalLoaders(planner_of(of_run), Reader(0, 10**6))
    plane = ThreadLoaders(of_run, tmp_path, steps_ahead)
    try:
        expected, found = trained(local, behind), trained(plane, behind)
        for one, other in zip(found, expected, strict=True):
            require_same(without_losses(one), without_losses(other))
        if behind == 9:
            until(lambda: plane.service.num_ahead == steps_ahead)
    finally:
        plane.close()
        local.close()


def test_weights_follow_and_what_lies_behind_matters(setup):
    """Else the test above would compare runs that follow nothing."""
    runs = []
    for behind in (2, 5):
        local = LocalLoaders(planner_of(setup(behind)), Reader(0, 10**6))
        runs.append([one.share.rows.tolist() for one in trained(local, behind)])
        local.close()
    assert runs[0][:2] == runs[1][:2] and runs[0] != runs[1]


def test_a_planner_that_was_restarted_decides_the_same(setup, tmp_path):
    """A step that is asked for once more, with newer losses than when it was decided."""
    of_run = setup(3)
    first = ThreadLoaders(of_run, tmp_path, 1)
    steps = trained(first, 3)
    first.close()
    latest = steps[-1].totals.before
    again = planning_of(of_run, tmp_path)
    seen = latest.losses.with_step(latest.steps, {"web": 3.0})
    answer = again.answer(replace(latest, losses=seen), [0])
    again.close()
    assert dict(answer.totals.fingerprints) == dict(steps[-1].totals.fingerprints)
