"""A step is planned by what was known so many steps before it, whoever plans it and when."""

import orjson
import pytest

from megatron_hdp.planner import LLAMA_7B
from megatron_hdp.planner.online import Corrections, FilterState, SeenCosts

STATE = FilterState.begin(LLAMA_7B, 2)


def after(changes, steps, behind=2):
    """What is known behind so many steps, with corrections found behind some of them."""
    seen = SeenCosts(behind)
    now = Corrections()
    for step in range(steps):
        now = changes.get(step, now)
        seen = seen.with_step(step, STATE, now)
    return seen


@pytest.mark.parametrize("behind", [2, 4])
def test_more_that_is_known_changes_no_step(behind):
    changes = {step: Corrections(linear_factor=1.0 + step) for step in (2, 3, 7, 30, 90)}
    whole = after(changes, 100, behind)
    for step in range(60, 102):
        early = after(changes, step - behind + 1, behind)
        assert early.covers(step) and not early.covers(step + 1)
        assert early.at(step) == whole.at(step)
    assert whole.num_changes == 5
    assert whole.at(90 + behind - 1) != whole.at(90 + behind) == Corrections(linear_factor=91.0)


def test_what_no_step_needs_any_more_is_forgotten():
    seen = after({step: Corrections(linear_factor=2.0 + step) for step in range(1000)}, 1000)
    assert len(seen.changes) < 70 and seen.num_changes == 1000


def test_a_record_gives_the_same():
    seen = after({3: Corrections(g=0.5, speeds=((1, 0.3),))}, 6)
    again = SeenCosts.from_record(orjson.loads(orjson.dumps(seen.to_record())))
    assert again.to_record() == seen.to_record()
    assert again.fingerprint() == seen.fingerprint()
    assert again.at(9) == seen.at(9) == Corrections(g=0.5, speeds=((1, 0.3),))
    assert seen.for_plans().filter is None and seen.for_plans().at(9) == seen.at(9)


def test_a_fingerprint_covers_all_of_it():
    seen = after({3: Corrections(speeds=((1, 0.3),))}, 6)
    others = [
        after({3: Corrections(speeds=((1, 0.31),))}, 6),
        after({4: Corrections(speeds=((1, 0.3),))}, 6),
        after({3: Corrections(speeds=((1, 0.3),))}, 7),
        after({3: Corrections(speeds=((1, 0.3),))}, 6, behind=4),
        seen.for_plans(),
    ]
    assert len({one.fingerprint() for one in [seen, *others]}) == 6
