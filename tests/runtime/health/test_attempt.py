"""Attempts over one store do not see each other's keys, whatever earlier ones left behind."""

import threading

import pytest
import torch.distributed as dist

from megatron_hdp.runtime.health.attempt import store_of_attempt


def meet(store, world_size, order, before_last=lambda: None):
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
    first, second = meet(store, 3, order), meet(store, 3, order)
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
    stores = meet(store, 3, (0, 2, 1), lambda: store.wait(["answer/left behind"]))
    stores[0].set("key", "1")
    assert stores[1].check(["key"]) and stores[2].check(["key"])


def test_fewer_ranks_than_before():
    store = dist.HashStore()
    meet(store, 3, (0, 1, 2))
    stores = meet(store, 2, (0, 1))
    stores[0].set("key", "1")
    assert stores[1].check(["key"])
    meet(store, 1, (0,))
