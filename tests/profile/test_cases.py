"""Cases fit into what a job has room for."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_hdp.profile.cases import ATTENTION, COMPUTE, RING, TRANSFER, Case, Room, cases_of

ROOMS = st.builds(
    Room,
    tokens_per_rank=st.integers(32, 100_000),
    longest=st.integers(32, 1_000_000),
    ranks=st.integers(1, 20),
    ranks_per_node=st.integers(1, 8),
    multiple=st.integers(1, 8),
    kv_bytes_per_layer=st.integers(1, 10_000),
)


@given(ROOMS)
def test_they_fit(room):
    for case in cases_of(room):
        assert 1 <= case.degree <= room.ranks
        assert case.leaves_node == (case.degree > room.ranks_per_node)
        if case.kind == TRANSFER:
            assert 0 < case.num_bytes <= 4 * room.tokens_per_rank * room.kv_bytes_per_layer
            continue
        assert min(case.lengths) >= 2 and max(case.lengths) <= room.longest
        assert case.num_tokens <= room.tokens_per_rank * case.degree
        of_chunk = 2 * case.degree if case.degree > 1 else 1
        assert all(length % (of_chunk * room.multiple) == 0 for length in case.lengths)
        assert (case.degree > 1) == (case.kind == RING)


@given(ROOMS)
def test_each_is_run_once_and_is_fitted_or_held_out(room):
    cases = cases_of(room)
    assert len({(one.kind, one.lengths, one.degree, one.num_bytes) for one in cases}) == len(cases)
    assert all(one.kind in (COMPUTE, RING) for one in cases if one.is_held_out)
    degrees = {one.degree for one in cases if one.kind == RING and not one.is_held_out}
    assert room.ranks == 1 or (room.ranks in degrees) or room.longest < 100 * room.ranks


def test_held_out_are_lengths_and_degrees_between():
    cases = cases_of(Room(2048, 8192, ranks=8, ranks_per_node=4))
    rings = [one for one in cases if one.kind == RING]
    fitted = {one.degree for one in rings if not one.is_held_out}
    assert fitted == {2, 4, 8}
    assert {one.degree for one in rings} - fitted == {3, 6}
    assert {one.degree for one in cases if one.kind == TRANSFER} == {4, 8}
    whole = {one.lengths for one in cases if one.kind == COMPUTE and one.is_held_out}
    assert whole == {(1433,), (716,), (368,), (256,) * 8}
    assert not whole & {one.lengths for one in cases if one.kind == ATTENTION}


def test_a_case_says_what_it_is():
    assert str(Case(COMPUTE, (1024,) * 2)) == "compute 2 x 1,024 tokens"
    assert str(Case(RING, (4096,), 3)) == "ring 4,096 tokens, 3 ranks"
    assert str(Case(TRANSFER, degree=2, num_bytes=4096)) == "transfer of 4,096 B, 2 ranks"
