"""Host memory in pieces: no two overlap, neighbours join, and the pool stops growing."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hdp.runtime.offload.host_pool import HostPool

SLAB = 1 << 14


def span(buffer):
    start = buffer.tensor.data_ptr()
    return start, start + len(buffer.tensor)


@given(st.lists(st.tuples(st.integers(1, SLAB), st.integers(0, 10)), max_size=60))
def test_pieces_never_overlap(calls):
    pool, held = HostPool(SLAB), []
    for size, victim in calls:
        if victim < len(held):
            pool.give_back(held.pop(victim))
        held.append(pool.take(size))
        assert len(held[-1].tensor) == size
        spans = sorted(map(span, held))
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    for buffer in held:
        pool.give_back(buffer)
    assert pool.used_bytes == 0
    before = pool.held_bytes
    for _ in range(before // SLAB):  # everything joined again: whole slabs are free
        pool.take(SLAB)
    assert pool.held_bytes == before


def test_a_piece_larger_than_a_slab_gets_a_power_of_two():
    pool = HostPool(SLAB)
    assert len(pool.take(3 * SLAB).tensor) == 3 * SLAB
    assert pool.held_bytes == 4 * SLAB


def test_the_pool_stops_growing():
    """Sizes of all lengths, last in first out: after some steps nothing more is asked for."""
    draw, pool, held_bytes = random.Random(0), HostPool(SLAB), []
    for _ in range(400):
        buffers = [pool.take(draw.randint(1, 3000)) for _ in range(50)]
        for buffer in reversed(buffers):
            pool.give_back(buffer)
        held_bytes.append(pool.held_bytes)
    assert held_bytes[100] == held_bytes[-1] <= 2 * 50 * 3000


@pytest.mark.parametrize("size", [0, 100, 3 << 12, -1])
def test_a_slab_that_is_no_power_of_two_is_refused(size):
    with pytest.raises(ValueError, match="expected a power of two of at least 512"):
        HostPool(size)
