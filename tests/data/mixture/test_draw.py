"""Every source keeps its share; a run goes on exactly, whatever becomes of other sources."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.data.mixture.draw import BatchSize
from megatron_hdp.data.mixture.position import Drawn, Position, position_of_run
from megatron_hdp.data.mixture.schedule import Phase
from megatron_hdp.data.order import Continuation, DataOrder
from tests.support.examples import some
from tests.support.mixtures import mixture


def steps(made, count, position=None):
    """The next steps of a mixture."""
    found, position = [], position or Position()
    for _ in range(count):
        found.append(made.step(position))
        position = found[-1].after
    return found


def drawn(found, made, name):
    """What steps hold of one source, in order: (row, start, length)."""
    index = [one.name for one in made.sources].index(name)
    return [
        (int(row), int(start), int(length))
        for step in found
        for source, row, start, length in zip(
            step.sources, step.rows, step.starts, step.lengths, strict=True
        )
        if source == index
    ]


lengths_of_sources = st.lists(
    st.lists(st.integers(1, 400), min_size=1, max_size=30), min_size=1, max_size=5
)


@settings(max_examples=some(60))
@given(data=st.data(), lengths=lengths_of_sources)
def test_every_source_keeps_its_share(data, lengths):
    num = len(lengths)
    weights = data.draw(st.lists(st.floats(1e-6, 1.0), min_size=num, max_size=num))
    size = data.draw(st.sampled_from([BatchSize(1), BatchSize(7), BatchSize(tokens=50)]))
    table = {f"s{i}": one for i, one in enumerate(lengths)}
    made = mixture(table, weights=dict(zip(table, weights, strict=True)), batch=size)
    shares = made.schedule.settings[0].weights
    position = Position()
    longest = [max(one) for one in lengths]
    for _ in range(60):
        position = made.step(position).after
        for i, name in enumerate(table):
            ahead = position.of(name).amount - shares[i] * position.tokens
            assert ahead <= longest[i] + 1e-6
            assert -ahead <= max(longest) + 1e-6
            assert ahead == pytest.approx(-position.of(name).owed, abs=1e-6)


def test_sources_that_wait_for_others_wait_at_once():
    table = {"a": [3, 5], "b": [7], "c": [2, 2, 9]}
    plain, waiting = mixture(table), mixture(table)
    all_asked = threading.Barrier(len(table))

    def asks_others(stream):
        real, has_waited = stream.pieces, []

        def pieces(*arguments):
            if not has_waited:
                has_waited.append(all_asked.wait(120))  # raises where they come one by one
            return real(*arguments)

        return pieces

    for one in waiting.sources:
        one.stream.pieces = asks_others(one.stream)
    with ThreadPoolExecutor(len(table)) as threads:
        waiting._together = threads.map
        found, expected = waiting.step(Position()), plain.step(Position())
    assert drawn([found], waiting, "c") == drawn([expected], plain, "c")
    assert found.after == expected.after


def test_the_share_of_a_rare_source_of_long_sequences():
    """Of 25 million tokens 2,500 are its share."""
    table = {"common": [10] * 50, "rare": [1000]}
    made = mixture(table, weights={"common": 1.0, "rare": 1e-4}, batch=BatchSize(tokens=10**6))
    found = steps(made, 25)
    for step in found:
        assert abs(step.after.of("rare").amount - step.after.tokens * 1e-4 / 1.0001) <= 1000
    assert found[-1].after.of("rare").amount in (2000, 3000)


def test_ties_go_to_the_first():
    made = mixture({"a": [5], "b": [5]}, weights={"a": 1, "b": 1}, batch=BatchSize(sequences=4))
    assert made.step(Position()).sources.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("unit", ["tokens", "loss-tokens", "sequences"])
def test_the_unit_of_the_weights(unit):
    table, weights = {"short": [4] * 9, "long": [40] * 9}, {"short": 1, "long": 3}
    made = mixture(table, weights=weights, weight_unit=unit, untrained=2, batch=BatchSize(40))
    found = steps(made, 25)
    short, long = (drawn(found, made, name) for name in table)
    # of a row's n - 1 labels every second is trained: 2 of 4 tokens, 20 of 40
    amounts = {"tokens": (4, 40), "loss-tokens": (2, 20), "sequences": (1, 1)}[unit]
    ratio = len(long) * amounts[1] / (len(short) * amounts[0])
    assert ratio == pytest.approx(3, rel=0.02)
    assert found[-1].after.of("long").amount == len(long) * amounts[1]


def test_a_step_in_tokens_takes_what_fits_and_at_least_one():
    made = mixture({"a": [30], "b": [70]}, weights={"a": 1, "b": 1}, batch=BatchSize(tokens=60))
    found = steps(made, 30)
    assert all(step.tokens <= 60 or len(step) == 1 for step in found)
    for step, following in zip(found, found[1:], strict=False):
        assert step.tokens + following.lengths[0] > 60


def test_one_source_is_its_permutations_in_a_row():
    made = mixture({"a": range(1, 11)}, batch=BatchSize(sequences=7))
    rows = np.concatenate([step.rows for step in steps(made, 10)])
    epochs = rows.reshape(7, 10)
    assert all(sorted(one) == list(range(10)) for one in epochs)
    assert len({tuple(one) for one in epochs}) == 7
    assert all(step.after.of("a").owed == 0 for step in steps(made, 10))


table_of_three = {"a": [3, 50, 8, 20], "b": [100, 7, 7, 7, 9], "c": [31] * 6}


@settings(max_examples=some(60))
@given(
    first=st.integers(1, 9),
    change=st.sampled_from(["nothing", "weights", "less", "more", "other order"]),
    batch=st.sampled_from([BatchSize(sequences=3), BatchSize(tokens=90)]),
)
def test_a_run_goes_on_where_it_was(first, change, batch):
    """No sequence of a source that stays is repeated or skipped within its epochs."""
    weights = {"a": 0.5, "b": 0.2, "c": 0.3}
    made = mixture(table_of_three, weights=weights, batch=batch)
    before = steps(made, first)
    record = before[-1].after.to_record()
    table = dict(table_of_three)
    if change == "weights":
        weights = {"a": 0.1, "b": 0.1, "c": 0.8}
    elif change == "less":
        del table["b"]
    elif change == "more":
        table["d"], weights["d"] = [11, 12, 13], 0.4
    elif change == "other order":
        table = dict(reversed(table.items()))
    changed = mixture(table, weights=weights, batch=batch)
    streams = {one.name: one for one in mixture({**table_of_three, "d": [11, 12, 13]}).sources}
    changed.sources = tuple(
        replace(one, stream=streams[one.name].stream) for one in changed.sources
    )
    after = steps(changed, 12, Position.from_record(record))
    for name in set(table) & set(table_of_three):
        rows = [row for row, _, _ in drawn(before, made, name) + drawn(after, changed, name)]
        size = len(table_of_three[name])
        expected = streams[name].stream.pieces(0, 0, len(rows), 2**30).rows
        assert rows == expected.tolist()
        whole = np.array(rows[: len(rows) // size * size]).reshape(-1, size)
        assert all(sorted(epoch) == list(range(size)) for epoch in whole)
    if change == "nothing":
        straight = steps(made, first + 12)[first:]
        assert [step.after for step in after] == [step.after for step in straight]
        assert all(np.array_equal(x.rows, y.rows) for x, y in zip(after, straight, strict=True))
    if change == "less":
        assert after[-1].after.of("b") == before[-1].after.of("b")  # it may come back


def test_a_source_that_ends_leaves_its_share_to_the_others():
    table, weights = {"a": [10] * 4, "b": [10] * 5, "c": [10] * 50}, {"a": 2, "b": 1, "c": 1}
    ends = {"a": 2, "b": 2, "c": 1}
    made = mixture(table, weights=weights, max_epochs=ends, batch=BatchSize(sequences=8))
    found = steps(made, 12)
    assert [len(step) for step in found] == [8] * 8 + [4, 0, 0, 0]
    assert sorted(drawn(found, made, "a")) == sorted([(i, 0, 10) for i in range(4)] * 2)
    assert found[-1].after.of("a").rows == 8
    ended = next(i for i, step in enumerate(found) if step.after.of("a").rows == 8)
    one, other = (found[ended].after.of(name).rows for name in "bc")
    later = found[ended + 1].after
    assert later.of("b").rows - one == pytest.approx(later.of("c").rows - other, abs=1)


@pytest.mark.parametrize("batch", [BatchSize(sequences=7), BatchSize(tokens=200)])
@pytest.mark.parametrize("first", [1, 5, 23])
def test_without_a_source_steps_are_those_of_a_mixture_that_lacks_it(first, batch):
    weights = {"a": 0.5, "b": 0.2, "c": 0.3}
    made = mixture(table_of_three, weights=weights, batch=batch)
    at = steps(made, first)[-1].after
    found = steps(made, 30, replace(at, without=("b",)))
    assert drawn(found, made, "b") == []
    assert {step.after.without for step in found} == {("b",)}
    assert found[-1].after.of("b") == at.of("b")  # it may come back
    lacking = mixture(table_of_three, weights={**weights, "b": 0}, batch=batch)
    for step, other in zip(found, steps(lacking, 30, at), strict=True):
        for name in ("sources", "rows", "starts", "lengths", "num_loss_tokens"):
            assert np.array_equal(getattr(step, name), getattr(other, name))
        assert step.after == replace(other.after, without=("b",))


def test_a_source_that_has_failed_is_asked_nothing(monkeypatch):
    made = mixture({"a": [10] * 4, "b": [10] * 4}, max_epochs={"a": 1, "b": 1})

    def fail(rows):
        raise AssertionError("it was asked")

    monkeypatch.setattr(made.sources[1].stream.rows, "lengths", fail)
    at = Position(without=("b",))
    monkeypatch.setattr(
        made.sources[1].stream, "pieces", lambda number, offset, count, most: _none(count)
    )
    assert len(made.step(at)) == 4 and not made.is_over(at)
    assert made.is_over(made.step(at).after)
    with pytest.raises(AssertionError, match="it was asked"):
        made.is_over(replace(made.step(at).after, without=()))


def _none(count):
    assert not count
    return mixture({"b": [10]}).sources[0].stream.pieces(0, 0, 0, 100)


def test_a_position_is_told_from_one_without_a_source():
    at = Position(3, 30, 300)
    other = replace(at, without=("b",))
    assert at.key() != other.key()
    assert Position.from_record(orjson.loads(orjson.dumps(other.to_record()))) == other
    older = {name: value for name, value in at.to_record().items() if name != "without"}
    assert Position.from_record(older) == at


def test_a_run_that_is_started_again_tries_all_sources_again():
    at = Position(3, 30, 300, {"a": Drawn(rows=2), "b": Drawn(rows=1)}, without=("b",))
    order = DataOrder(hybrid_data_parallel=True, seed=1, seq_length=100, sources={})
    goes_on = Continuation(order, {"new": "b"}, (), ())
    assert position_of_run(at.to_record(), goes_on, 3, 30, 300) == Position(
        3, 30, 300, {"a": Drawn(rows=2), "new": Drawn(rows=1)}
    )


def test_a_position_that_is_past_the_end_is_the_end():
    made = mixture({"a": [10] * 4}, max_epochs={"a": 1}, batch=BatchSize(sequences=3))
    at = Position.of_one_source("a", 100)
    assert len(made.step(at)) == 0 and made.step(at).after.of("a").rows == 100


@pytest.mark.parametrize("splits_long", [True, False])
@pytest.mark.parametrize("batch", [BatchSize(sequences=3), BatchSize(tokens=25)])
def test_a_length_curriculum_cuts_rows_and_loses_none(splits_long, batch):
    table = {"a": [3, 25, 8, 40, 17, 100]}
    phases = [Phase(max_length=10), Phase(begin=5, max_length=16), Phase(begin=9, max_length=128)]
    made = mixture(table, phases=phases, batch=batch, splits_long=splits_long, max_length=128)
    found = steps(made, 30)
    for number, step in enumerate(found):
        bound = 10 if number < 5 else 16 if number < 9 else 128
        assert step.max_length == bound and step.lengths.max() <= bound
    pieces = drawn(found, made, "a")
    chain = made.sources[0].stream.pieces(0, 0, 400, 128).rows.tolist()
    if not splits_long:
        assert [row for row, _, _ in pieces] == chain[: len(pieces)]
        assert all(start == 0 for _, start, _ in pieces)
        return
    number, offset = 0, 0
    for row, start, length in pieces:  # each begins where the one before ended
        assert (row, start) == (chain[number], offset)
        offset += length
        if offset == table["a"][row]:
            number, offset = number + 1, 0


def test_labels_of_pieces():
    table = {"a": [25]}
    made = mixture(table, phases=[Phase(max_length=10)], max_length=64)
    step = made.step(Position())
    assert step.lengths[:3].tolist() == [10, 10, 5]
    assert step.num_labels[:3].tolist() == [10, 10, 4]  # a next piece gives the label of the last
    cut = mixture(table, phases=[Phase(max_length=10)], max_length=64, splits_long=False)
    assert cut.step(Position()).num_labels[:2].tolist() == [9, 9]


def test_a_linear_change_of_weights():
    table = {"a": [10] * 7, "b": [10] * 7}
    phases = [Phase(weights={"a": 1.0}), Phase(begin=10, end=20, weights={"b": 1.0})]
    made = mixture(table, phases=phases, batch=BatchSize(sequences=1000))
    found = steps(made, 25)
    shares = [float((step.sources == 1).mean()) for step in found]
    assert shares[:11] == [0.0] * 11
    assert shares[10:21] == pytest.approx([i / 10 for i in range(11)], abs=0.002)
    assert shares[21:] == [1.0] * 4


def test_a_schedule_in_tokens():
    table = {"a": [10], "b": [10]}
    phases = [Phase(weights={"a": 1}), Phase(begin=95, weights={"b": 1})]
    made = mixture(table, phases=phases, unit="tokens", batch=BatchSize(sequences=2))
    sources = [step.sources.tolist() for step in steps(made, 7)]
    assert sources == [[0, 0]] * 5 + [[1, 1]] * 2  # 100 tokens are drawn before the sixth


GROWING = BatchSize(5, growth=((0, 1), (5, 3), (10, 5)))


def test_the_size_of_a_step_depends_on_what_was_drawn():
    assert [GROWING.at(drawn) for drawn in (0, 4, 5, 9, 10, 10**9)] == [1, 1, 3, 3, 5, 5]
    assert BatchSize(4).at(7) == 4 and BatchSize(tokens=9).at(7) is None


@pytest.mark.parametrize("sizes", [{}, {"sequences": 1, "tokens": 1}, {"sequences": 0}])
def test_a_batch_has_one_size(sizes):
    with pytest.raises(ValueError, match="exactly one, at least 1"):
        BatchSize(**sizes)


@pytest.mark.parametrize(
    ("unit", "growth"),
    [
        ("sequences", ((1, 2), (3, 4))),
        ("sequences", ((0, 2), (3, 4), (3, 5))),
        ("tokens", ((0, 2),)),
        ("sequences", ((0, 0),)),
    ],
)
def test_growth_that_is_none_is_refused(unit, growth):
    with pytest.raises(ValueError, match="sizes of a global batch"):
        BatchSize(**{unit: 4, "growth": growth})


def test_steps_grow_and_every_row_is_drawn_as_often_as_without():
    table = {"s": list(range(1, 40))}
    growing, position, rows, sizes = mixture(table, batch=GROWING), Position(), [], []
    while position.sequences < 39:
        step = growing.step(position)
        again = growing.step(Position.from_record(position.to_record()))  # as after a resume
        assert again.rows.tolist() == step.rows.tolist()
        rows += step.rows.tolist()
        sizes.append(len(step.rows))
        position = step.after
    assert sizes[:9] == [1, 1, 1, 1, 1, 3, 3, 5, 5]
    plain = mixture(table, batch=BatchSize(39)).step(Position())
    assert rows[:39] == plain.rows.tolist()
