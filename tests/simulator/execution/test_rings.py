"""A ring hop by hop: small ones by hand, any by a slow simulation of every member and message."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.simulator.execution.rings import own_pass_s, pass_s


def ring_s(lead: list[float], step: list[float], hop: float) -> float:
    counts = np.array([len(lead)])
    return float(pass_s(counts, np.array(lead), np.array(step), np.array([hop]))[0])


def slowly(lead: list[float], step: list[float], hop: float) -> float:
    """The module's docstring, member by member."""
    size = len(lead)
    begin = [list(lead)]
    for _ in range(size - 1):
        now = begin[-1]
        leaves = [max(now[i], now[(i + 1) % size]) for i in range(size)]
        begin.append(
            [
                max(now[i] + step[i], leaves[i] + hop, leaves[(i - 1) % size] + hop)
                for i in range(size)
            ]
        )
    return max(begin[-1][i] + step[i] for i in range(size))


@pytest.mark.parametrize(
    ("lead", "step", "hop", "expected"),
    [
        ([0.0], [5.0], 9.0, 5.0),  # alone: nothing travels
        ([0.0, 0.0], [3.0, 3.0], 2.0, 6.0),  # the hop is hidden
        ([0.0, 0.0], [3.0, 3.0], 5.0, 8.0),  # 3 of it are
        ([1.0, 1.0], [3.0, 3.0], 5.0, 9.0),  # what comes before hides nothing
        ([0.0, 0.0, 0.0], [3.0] * 3, 2.0, 9.0),
        ([0.0, 0.0, 0.0], [3.0] * 3, 5.0, 13.0),  # two hops of 5, the last step
        ([4.0, 0.0, 0.0], [3.0] * 3, 5.0, 17.0),  # all wait for the one with local sequences
        # one of half the speed: it is always late, the other waits for what it sends
        ([0.0, 0.0], [3.0, 6.0], 5.0, 12.0),
        ([0.0, 0.0], [1.0, 2.0], 5.0, 7.0),
        # 0 begins its second step at 5; 2 at 6, when it has computed; a third one each
        ([0.0, 0.0, 0.0], [3.0, 3.0, 6.0], 5.0, 18.0),
        # a late member that is fast, then its slow neighbour: the latter's steps begin at 4 + 5,
        # 9 + 6, so that neither alone would take as long
        ([4.0, 0.0, 0.0], [1.0, 6.0, 1.0], 5.0, 21.0),
    ],
)
def test_small_rings(lead: list[float], step: list[float], hop: float, expected: float) -> None:
    assert ring_s(lead, step, hop) == expected
    assert slowly(lead, step, hop) == expected


seconds = st.integers(0, 40).map(lambda n: n / 4)


@given(st.data())
def test_any_ring(data: st.DataObject) -> None:
    rings = data.draw(
        st.lists(
            st.lists(st.tuples(seconds, st.sampled_from([1.0, 1.5, 3.0])), min_size=1, max_size=9),
            min_size=1,
            max_size=6,
        )
    )
    hops = data.draw(st.lists(seconds, min_size=len(rings), max_size=len(rings)))
    flat = np.array([member for ring in rings for member in ring])
    found = pass_s(np.array([len(ring) for ring in rings]), flat[:, 0], flat[:, 1], np.array(hops))
    for ring, hop, one in zip(rings, hops, found.tolist(), strict=True):
        lead, step = [member[0] for member in ring], [member[1] for member in ring]
        assert one == pytest.approx(slowly(lead, step, hop), rel=1e-12)


@settings(max_examples=50)
@given(st.lists(st.tuples(seconds, seconds), min_size=2, max_size=8), seconds, seconds)
def test_no_member_is_faster_than_by_itself(
    members: list[tuple[float, float]], hop: float, more: float
) -> None:
    lead, step = (np.array(one) for one in zip(*members, strict=True))
    counts = np.array([len(members)])
    whole = pass_s(counts, lead, step, np.array([hop]))
    own = own_pass_s(counts, lead, step, np.array([hop]))
    assert own.max() <= whole[0] * (1 + 1e-12)
    assert pass_s(counts, lead, step, np.array([hop + more]))[0] >= whole[0] * (1 - 1e-12)
