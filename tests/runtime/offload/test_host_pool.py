"""Host memory in pieces: no two overlap, neighbours join, and the pool stops growing."""

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


@pytest.mark.parametrize("size", [0, 100, 3 << 12, -1])
def test_a_slab_that_is_no_power_of_two_is_refused(size):
    with pytest.raises(ValueError, match="expected a power of two of at least 512"):
        HostPool(size)


PIECE = 512


@given(st.lists(st.integers(1, 3 * SLAB // PIECE), min_size=1, max_size=40), st.data())
def test_what_is_reserved_can_be_taken(pieces, data):
    """In any order, beside what is taken already; the pool then holds no more than before."""
    pool, sizes = HostPool(SLAB), [PIECE * one for one in pieces]
    taken = [pool.take(PIECE * one) for one in data.draw(st.lists(st.integers(1, 40), max_size=5))]
    pool.reserve(sum(sizes), max(sizes))
    held_bytes = pool.held_bytes
    taken += [pool.take(size) for size in data.draw(st.permutations(sizes))]
    assert pool.held_bytes == held_bytes and pool.num_late == 0
    for buffer in taken:
        pool.give_back(buffer)
    pool.reserve(sum(sizes), max(sizes))
    assert pool.held_bytes == held_bytes


def test_what_was_not_reserved_is_told_once_and_given(recwarn):
    pool = HostPool(SLAB)
    pool.reserve(0, 0)
    assert pool.held_bytes == 0
    pool.take(10)
    assert not recwarn, "nothing had been reserved"
    pool.reserve(SLAB, PIECE)
    pieces = [pool.take(SLAB) for _ in range(4)]
    assert len(pieces) == 4 and pool.num_late == 3
    (warning,) = recwarn
    assert "16,384 bytes of the host beyond the 32,768 that were reserved" in str(warning.message)
