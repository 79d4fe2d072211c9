"""The next item is prepared in the background, and only once."""

import threading

import pytest

from megatron_hdp.data.one_ahead import OneAhead


@pytest.fixture
def calls():
    return []


@pytest.fixture
def ahead(calls):
    def prepare(key):
        calls.append((key, threading.current_thread().name))
        if key < 0:
            raise ValueError(f"no item {key}")
        return key * 10

    made = OneAhead(prepare)
    yield made
    made.close()


def test_the_expected_item_is_prepared_once(ahead, calls):
    ahead.expect(2)
    assert ahead.get(2) == 20
    assert [key for key, _ in calls] == [2]
    assert all(name.startswith("one-ahead") for _, name in calls)


def test_another_item_than_expected(ahead, calls):
    ahead.expect(2)
    assert ahead.get(5) == 50 and calls[-1][0] == 5
    assert ahead.get(2) == 20  # what was expected before is forgotten


def test_keys_that_are_told_alike_are_one():
    calls = []
    made = OneAhead(lambda key: calls.append(key) or len(key), told_by=str.lower)
    made.expect("Key")
    assert made.get("key") == 3 and calls == ["Key"]
    made.expect("a")
    assert made.get("bb") == 2
    made.close()


def test_preparing_goes_on_while_the_caller_works():
    entered, leave = threading.Event(), threading.Event()

    def prepare(key):
        entered.set()
        assert leave.wait(120)
        return key

    ahead = OneAhead(prepare)
    ahead.expect(1)
    assert entered.wait(120)  # in the background: nobody has asked for it yet
    leave.set()
    assert ahead.get(1) == 1
    ahead.close()


def test_an_error_reaches_who_asks(ahead):
    ahead.expect(-1)
    with pytest.raises(ValueError, match="no item -1"):
        ahead.get(-1)
    assert ahead.get(1) == 10
