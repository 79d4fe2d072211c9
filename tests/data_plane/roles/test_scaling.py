"""More loaders where a source is behind, fewer where it is idle, within the limits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.data.spec import LoadersSpec
from megatron_hdp.data_plane.roles import Scaling, Seen

examples = settings(max_examples=100)
IDLE, BUSY, WELL = Seen(0.05, False, 10), Seen(0.95, False, 10), Seen(0.5, False, 10)
BEHIND = Seen(0.5, True, 10)


def looks(scaling, *seen, source="web"):
    return [scaling.look({source: one})[source] for one in seen]


def scaling_of(**spec):
    return Scaling(LoadersSpec(backend="ray", **spec))


@pytest.mark.parametrize(
    ("begins", "seen", "wanted"),
    [
        pytest.param(1, [BUSY] * 7, [1, 1, 2, 2, 2, 3, 3], id="busy: after three looks"),
        pytest.param(1, [BEHIND] * 4, [1, 2, 2, 3], id="steps wait for it: sooner"),
        pytest.param(4, [IDLE] * 10, [4, 4, 3, 3, 3, 2, 2, 2, 1, 1], id="idle: one by one"),
        pytest.param(1, [IDLE, IDLE, BEHIND, BEHIND], [1, 1, 1, 2], id="idle before: as soon"),
        pytest.param(1, [BUSY, BUSY, WELL] * 6, [1] * 18, id="not in a row"),
        pytest.param(1, [BUSY, BUSY, IDLE] * 6, [1] * 18, id="idle in between"),
    ],
)
def test_looks_in_a_row_decide(begins, seen, wanted):
    scaling = scaling_of()
    scaling.wanted["web"] = begins
    assert looks(scaling, *seen) == wanted


def test_it_keeps_between_min_and_max():
    scaling = scaling_of(min=2, max=3)
    assert looks(scaling, *[BEHIND] * 20)[-1] == 3
    assert looks(scaling, *[IDLE] * 40)[-1] == 2


def test_it_keeps_within_the_memory_of_its_nodes():
    large = Seen(0.95, True, 300)
    assert looks(scaling_of(memory_mb=1000, max=9), *[large] * 30)[-1] == 3
    two_nodes = Scaling(LoadersSpec(backend="ray", memory_mb=1000, max=9), num_nodes=2)
    assert looks(two_nodes, *[large] * 30)[-1] == 6


def test_what_other_sources_take_counts():
    scaling = scaling_of(memory_mb=1000, max=9)
    for _ in range(30):
        found = scaling.look({"web": Seen(0.95, True, 100), "images": Seen(0.5, False, 700)})
    assert found == {"web": 3, "images": 1}


def test_sources_are_looked_at_one_by_one():
    scaling = scaling_of()
    for _ in range(6):
        found = scaling.look({"web": BUSY, "code": IDLE, "chat": WELL})
    assert found == {"web": 3, "code": 1, "chat": 1}


@examples
@given(
    bounds=st.tuples(st.integers(1, 4), st.integers(0, 4)),
    memory_mb=st.integers(1, 3000),
    seen=st.lists(
        st.tuples(st.floats(0, 1), st.booleans(), st.floats(0, 500), st.floats(0, 1)), max_size=60
    ),
)
def test_no_limit_is_ever_exceeded(bounds, memory_mb, seen):
    least, most = bounds[0], sum(bounds)
    scaling = scaling_of(min=least, max=most, memory_mb=memory_mb)
    before = {"web": least, "code": least}
    for busy, behind, size_mb, other_busy in seen:
        found = scaling.look(
            {"web": Seen(busy, behind, size_mb), "code": Seen(other_busy, False, size_mb)}
        )
        for name, count in found.items():
            assert least <= count <= most
            assert abs(count - before[name]) <= 1
        if found != before and sum(found.values()) > sum(before.values()):
            assert sum(found.values()) * size_mb <= memory_mb + 1e-6
        before = found
