"""A loader gives what its source holds, in few bytes, to any number of askers at once."""

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.data_plane.roles import LoadingService, Wanted

examples = settings(max_examples=60)


class Table:
    """A source of some rows of numbers; every `untrained`-th label is not trained."""

    def __init__(self, values, untrained=None):
        self.values = np.asarray(values)
        self.untrained = untrained

    def lengths(self, rows):
        return np.full(len(rows), len(self.values))

    def tokens(self, row, start, count):
        return self.values[start : start + count] + row

    def is_trained(self, row, start, stop):
        places = np.arange(start, stop)
        return places % self.untrained > 0 if self.untrained else places >= 0


def wanted(*pieces):
    columns = np.array(pieces, dtype=np.int64).reshape(-1, 4).T
    return Wanted(*columns)


@pytest.mark.parametrize(
    ("values", "num_bytes"),
    [
        *(([0, 65535], 2), ([0, 65536], 4), ([-1, 5], 4), ([2**31 - 1], 4)),
        *(([2**31], 8), ([-(2**40)], 8), ([], 2)),
    ],
)
def test_tokens_travel_in_the_narrowest_integers(values, num_bytes):
    loaded = LoadingService(Table(values)).load(wanted((0, 0, len(values), 0)))
    assert loaded.tokens.tolist() == values
    assert loaded.tokens.itemsize == num_bytes
    assert loaded.trained is None  # all of them
    assert loaded.num_bytes == num_bytes * len(values)


@examples
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 90), st.integers(0, 9)), max_size=9))
def test_any_pieces_are_what_the_source_holds(pieces):
    table = Table(np.arange(100) * 700, untrained=3)
    service = LoadingService(table)
    loaded = service.load(wanted(*((row, start, n + 1, n) for row, start, n in pieces)))
    expected = [table.tokens(row, start, n + 1) for row, start, n in pieces]
    assert loaded.tokens.tolist() == np.concatenate([[], *expected]).tolist()
    trained = [one for _, s, n in pieces for one in table.is_trained(0, s, s + n)]
    if loaded.trained is None:
        assert all(trained)
    else:
        assert np.unpackbits(loaded.trained, count=len(trained)).tolist() == trained
    assert service.figures.tokens == len(loaded.tokens)


def test_its_figures_count_all_threads():
    service = LoadingService(Table(np.arange(50), untrained=2))
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: service.load(wanted((0, 0, 9, 8))), range(200)))
    assert {one.num_bytes for one in found} == {9 * 2 + 1}
    assert service.figures.tokens == 1800 and service.figures.busy_s > 0


def test_it_is_busy_while_a_request_runs_and_once_however_many_do():
    """Its share of the time, 0 to 1, says whether another is needed; of long requests, too."""
    begin, end = Barrier(3), Event()

    class Slow(Table):
        def lengths(self, rows):
            begin.wait(60)
            assert end.wait(60)
            return super().lengths(rows)

    service = LoadingService(Slow([1, 2]))
    with ThreadPoolExecutor(2) as threads:
        began = time.perf_counter()
        asked = [threads.submit(service.lengths, np.arange(2)) for _ in range(2)]
        begin.wait(60)
        time.sleep(0.05)
        during, so_far_s = service.figures, time.perf_counter() - began
        assert 0.05 <= during.busy_s <= so_far_s
        end.set()
        assert [one.result(60).tolist() for one in asked] == [[2, 2]] * 2
        all_s = time.perf_counter() - began
    after = service.figures
    assert during.busy_s < after.busy_s <= all_s
    time.sleep(0.01)
    assert service.figures == after


def test_a_request_that_fails_has_ended():
    class Failing(Table):
        def tokens(self, row, start, count):
            raise ValueError("planted")

    service = LoadingService(Failing([1, 2]))
    with pytest.raises(ValueError, match="planted"):
        service.load(wanted((0, 0, 2, 1)))
    after = service.figures
    assert after.tokens == 0 and service.figures == after


def test_metadata_are_the_sources_own(services, corpus):
    rows = np.array([3, 0, 2])
    for name, source in zip(corpus.names, corpus.sources, strict=True):
        assert services[name].lengths(rows).tolist() == source.lengths(rows).tolist()
        starts, stops = np.array([0, 1, 0]), np.array([2, 4, 3])
        trained = services[name].num_trained(rows, starts, stops)
        assert trained.tolist() == source.num_trained(rows, starts, stops).tolist()
