"""Ranks wait for each other, agree or say who holds what; attempts do not see each other's keys."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_hdp.runtime.health.agreement import (
    DisagreementError,
    fingerprint,
    meet,
    require_agreement,
)
from megatron_hdp.runtime.health.attempt import store_of_attempt
from megatron_hdp.runtime.timeline import MEETING, Timeline

BIG = 2**64 - 1


def agree(values):
    facts = {"plan": values[dist.get_rank()], "lengths": BIG}
    try:
        return require_agreement(facts, torch.device("cpu"))
    except DisagreementError as error:
        return str(error)


@pytest.mark.parametrize("values", [[0, 0, BIG], [5, 6, 5], [2**63, 2**63 - 1, 2**63]])
def test_one_other_value_stops_every_rank(run_ranks, values):
    assert run_ranks(3, agree, values[:1] * 3) == [None] * 3
    messages = run_ranks(3, agree, values)
    assert len(set(messages)) == 1
    assert "plan: " in messages[0] and "lengths" not in messages[0].split("expected")[0]
    odd = next(rank for rank in range(3) if values.count(values[rank]) == 1)
    assert f"{values[odd]:#018x} on rank {odd}" in messages[0]


def test_fingerprint_tells_parts_apart():
    assert fingerprint("ab", "c") != fingerprint("a", "bc")
    assert fingerprint(1, 2.5, None) == fingerprint(1, 2.5, None)
    assert 0 <= fingerprint(b"x") < 2**64


def meetings():
    """Body of a rank: whether it came out of the first of two meetings after the last one came."""
    timeline, store = Timeline(), distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        time.sleep(0.3)
        store.add("the last one comes", 1)
    meet(timeline)
    was_there = store.add("the last one comes", 0)
    meet(timeline)
    assert not any(kind == MEETING for kind, _, _ in timeline.current())
    return was_there


def test_all_wait_for_the_last(run_ranks):
    assert run_ranks(3, meetings) == [1, 1, 1]
    assert run_ranks(1, meetings) == [0]  # alone nobody is waited for


def stores_of(store, world_size, order, before_last=lambda: None):
    """The stores of all ranks, whose threads start in this order, the last one after the call."""
    stores = {}

    def join(rank):
        stores[rank] = store_of_attempt(store, rank, world_size)

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in order]
    for thread in threads:
        if thread is threads[-1]:
            before_last()
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "ranks do not meet"
    return stores


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_attempts_have_keys_of_their_own(order):
    store = dist.HashStore()
    first, second = stores_of(store, 3, order), stores_of(store, 3, order)
    first[0].set("address", "old")
    assert first[2].get("address") == b"old"
    assert not second[1].check(["address"])
    second[2].set("address", "new")
    assert second[0].get("address") == second[1].get("address") == b"new"
    assert first[1].get("address") == b"old"


def test_an_attempt_that_ended_before_all_had_come():
    """Rank 0 answers the word of an earlier attempt first, then that of the rank itself."""
    store = dist.HashStore()
    store.set("hello/1", "left behind")
    stores = stores_of(store, 3, (0, 2, 1), lambda: store.wait(["answer/left behind"]))
    stores[0].set("key", "1")
    assert stores[1].check(["key"]) and stores[2].check(["key"])


def test_fewer_ranks_than_before():
    store = dist.HashStore()
    stores_of(store, 3, (0, 1, 2))
    stores = stores_of(store, 2, (0, 1))
    stores[0].set("key", "1")
    assert stores[1].check(["key"])
    stores_of(store, 1, (0,))
