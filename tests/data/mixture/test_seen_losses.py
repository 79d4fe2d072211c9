"""What a mixture sees of the losses is the same whenever it is asked."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatron_hdp.data.mixture import Position, SeenLosses


def seen(behind, steps, begin=0):
    """Losses of steps from `begin` up to `steps`, as a run collects them."""
    found = SeenLosses(behind, steps=begin)
    for step in range(begin, steps):
        found = found.with_step(step, {"web": float(step)})
    return found


@given(behind=st.integers(2, 9), step=st.integers(0, 120), more=st.integers(0, 9))
def test_a_step_sees_the_same_whoever_decides_it(behind, step, more):
    """Decided as early as can be, when it is due, or once more while later ones run."""
    early = seen(behind, max(step - behind + 1, 0))
    late = seen(behind, step + min(more, behind))
    assert early.covers(step) and late.covers(step)
    assert early.before(step) == late.before(step)
    latest = [one["web"] for one in late.before(step)]
    assert latest == [float(one) for one in range(max(step - behind - 31, 0), step - behind + 1)]


@given(behind=st.integers(2, 9), step=st.integers(1, 120))
def test_what_is_not_known_yet_is_not_decidable(behind, step):
    known = seen(behind, step)
    assert known.covers(step) and known.covers(step + behind - 1)
    assert not known.covers(step + behind)
    assert Position(steps=step + behind - 1, losses=known).is_decidable
    assert not Position(steps=step + behind, losses=known).is_decidable
    assert Position(steps=step + behind).is_decidable


def test_a_position_takes_along_what_steps_follow():
    begun = Position(steps=5).following(3)
    assert begun.losses == SeenLosses(3, steps=5) and begun.following(None).losses is None
    after = Position(steps=6).seeing(begun, {"web": 2.0, "code": None, "chat": float("nan")})
    assert after.losses == SeenLosses(3, 6, ((5, {"web": 2.0}),))
    assert after.following(2).losses == replace(after.losses, behind=2)
    assert Position(steps=6).seeing(Position(steps=5), {"web": 2.0}).losses is None


def test_little_is_kept():
    assert len(seen(4, 1000).by_step) == 32 + 2 * 4 + 1


def test_a_record_gives_it_back_and_names_may_change():
    position = Position(steps=7, losses=seen(4, 7))
    assert Position.from_record(position.to_record()) == position
    assert Position.from_record({**position.to_record(), "losses": None}).losses is None
    record = Position().to_record()
    del record["losses"]  # of releases before
    assert Position.from_record(record) == Position()
    assert seen(4, 2).renamed({"web": "pages"}).by_step == (
        (0, {"pages": 0.0}),
        (1, {"pages": 1.0}),
    )
    assert position.key() == Position(steps=7).key()
