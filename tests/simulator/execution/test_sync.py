"""When gradients are reduced: behind the last backward, or part by part inside of it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.planner.lockstep import end_together, slots
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.simulator.execution import execute
from megatron_hdp.simulator.execution.step import reduced_s
from tests.planner.problems import Problem, problems


def parts_slowly(
    end: list[float], last: list[float], inside: list[bool], reduction: float, parts: int
) -> float:
    now = 0.0
    for part in range(1, parts + 1):
        ready = max(
            e - (1 - part / parts) * d if is_inside else e
            for e, d, is_inside in zip(end, last, inside, strict=True)
        )
        now = max(now, ready) + reduction / parts
    return now


@pytest.mark.parametrize(
    ("overlaps", "reduction", "parts", "expected"),
    [
        (False, 2.0, 4, 12.0),
        (True, 2.0, 4, 10.5),  # all but the last part is done in the last backward
        (True, 2.0, 1, 12.0),  # one part is there at the end
        (True, 8.0, 4, 15.0),  # the first part is there at 10 - 3/4 of 4 = 7
    ],
)
def test_two_ranks(overlaps: bool, reduction: float, parts: int, expected: float) -> None:
    end, last = [8.0, 10.0], [4.0, 4.0]
    found = reduced_s(np.array(end), np.array(last), overlaps, reduction, parts)
    assert found == expected == parts_slowly(end, last, [overlaps] * 2, reduction, parts)


def test_only_the_first_and_the_last_part_decide() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        ranks, parts = int(random.integers(1, 6)), int(random.integers(1, 9))
        end = random.uniform(5, 9, ranks)
        last, overlaps = random.uniform(0, 5, ranks), bool(random.random() < 0.5)
        reduction = float(random.uniform(0, 8))
        found = reduced_s(end, last, overlaps, reduction, parts)
        inside = [overlaps] * ranks
        slowly = parts_slowly(end.tolist(), last.tolist(), inside, reduction, parts)
        assert found == pytest.approx(slowly, rel=1e-12)


@settings(max_examples=30, deadline=None)
@given(problems(), st.sampled_from(["naive", "bytescale", "dp-balance"]), st.sampled_from([1, 3]))
def test_ranks_that_may_not_begin_decide_nothing(
    problem: Problem, strategy: str, stages: int
) -> None:
    plan = problem.plan(strategy)
    run = execute(plan, problem.model, pipeline=Pipeline(stages))
    of_ranks = slots(plan, aligned=stages > 1)
    inside = end_together(plan, of_ranks).tolist()
    padding = iter(range(plan.num_micro_batches, run.backward_s.shape[1]))
    named = [[next(padding) if m < 0 else m for m in one.tolist()] for one in of_ranks]
    last_s = run.backward_s[0][[one[-1] for one in named]]
    reduction = run.makespan_s
    for end_s in run.end_s:
        slowly = parts_slowly(end_s.tolist(), last_s.tolist(), inside, reduction, 5)
        assert reduced_s(end_s, last_s, True, reduction, 5) == pytest.approx(slowly, rel=1e-9)
