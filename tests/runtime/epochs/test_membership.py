"""A process in its job: it hears who is in, and its waits end with the epoch."""

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_hdp.runtime.epochs import (
    Epoch,
    Membership,
    NotNamedError,
    keys,
    membership,
    sockets,
)


@pytest.fixture
def store():
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )


def member_of(store, number, breaks=lambda: None):
    return Membership(("127.0.0.1", store.port), number, 30.0, breaks)


def name(store, number, members, why=""):
    epoch = Epoch(number, members, why)
    store.set(keys.members(number), epoch.to_json())
    return epoch


def test_waits_are_broken_until_the_epoch_is_left(store):
    broken, calm = [], []
    member = member_of(store, 0, lambda: broken.append(threading.current_thread()))
    epoch = name(store, 0, (0, 1))
    assert member.first() == epoch
    member.enter(epoch, lambda: calm.append(1))
    store.set(keys.news(0, 0, 0), keys.JOIN)
    deadline = time.monotonic() + 20
    while not member.leaves_next:
        assert time.monotonic() < deadline
    assert not member.is_over.is_set()
    store.set(keys.news(0, 0, 1), keys.OVER)
    assert member.is_over.wait(20)
    while len(broken) < 3:  # what the main thread begins to connect meanwhile, too
        assert time.monotonic() < deadline
    assert calm == [1]
    member.leave({"step": 4})
    assert json.loads(store.get(keys.vote(0, 0))) == {"step": 4}
    assert broken[-1] is threading.main_thread(), "the listening thread may be late"
    count = len(broken)
    time.sleep(0.05)
    assert len(broken) == count
    member.close()


def test_who_is_not_named_may_only_leave(store):
    member = member_of(store, 2)
    epoch = name(store, 0, (0, 1, 2))
    member.enter(epoch, lambda: None)
    member.leave({})
    name(store, 1, (0, 1), "member 2 was silent")
    with pytest.raises(NotNamedError, match="member 2 was silent"):
        member.settled(epoch)
    member.close()


def test_a_vote_of_one_that_died_behind_it_counts(store):
    member = member_of(store, 0)
    epoch = name(store, 0, (0, 1, 2))
    member.enter(epoch, lambda: None)
    member.leave({"step": 3})
    store.set(keys.vote(0, 1), json.dumps({"step": 4}))
    name(store, 1, (0, 2))
    found = []
    thread = threading.Thread(target=lambda: found.append(member.settled(epoch)))
    thread.start()
    store.set(keys.over(1), b"1")  # 2 died, too, and never voted
    last = name(store, 2, (0,))
    thread.join(20)
    assert found == [(last, {0: {"step": 3}, 1: {"step": 4}})]
    member.close()


ENDS = """
import builtins, sys, time
from megatron_hdp.runtime.epochs import Membership, keys

class Late:  # goes when the interpreter does
    def __init__(self, store):
        self.tell = lambda key=keys.news(0, 0, 0): (store.set(key, keys.JOIN), time.sleep(0.5))

    def __del__(self):
        self.tell()

member = Membership(("127.0.0.1", int(sys.argv[1])), 0, 30.0, lambda: None)
builtins.late = Late(member.enter(member.first(), lambda: None).underlying_store)
time.sleep(0.2)  # it listens
member.close()
"""


def test_news_while_a_member_ends_does_no_harm(store):
    """A joiner may get ready just when a member has done all its steps."""
    name(store, 0, (0,))
    command = [sys.executable, "-c", ENDS, str(store.port)]
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=570, env=os.environ | {"PYTHONPATH": "."}
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert store.get(keys.news(0, 0, 0)) == keys.JOIN


def address_of_a_dead_peer(store):
    """What gloo writes of a rank that has died since, at a port above all others."""
    spared = sockets.open_sockets()
    there = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=30))

    def begin():
        with contextlib.suppress(RuntimeError):
            dist.ProcessGroupGloo(there, 1, 2, timedelta(seconds=30))

    thread = threading.Thread(target=begin)
    thread.start()
    store.wait(["0/1"])
    written, ports = store.get("0/1"), []
    for _, one in sockets._tcp_sockets(spared):
        if sockets._listens(one):
            ports.append(struct.pack("!H", one.getsockname()[1]))
    sockets.shut_connections(spared)
    thread.join(20)
    family = struct.pack("=H", socket.AF_INET)
    (port,) = (one for one in ports if family + one in written)
    return written.replace(family + port, family + b"\xff\xff")


def test_own_listeners_are_called_until_the_groups_are_made(store, monkeypatch):
    called = []
    monkeypatch.setattr(membership, "shut_connections", lambda spared: None)
    monkeypatch.setattr(
        membership, "call_listeners", lambda others, members: called.append(members) or {"met"}
    )
    member = Membership(("127.0.0.1", store.port), 0, 30.0)
    member.enter(name(store, 0, (0, 1)), lambda: None)
    member._end_waits()
    assert called == [2] and "met" in member._others  # once each
    member.has_met()
    member._end_waits()
    assert called == [2]
    member.close()


def test_who_listens_for_a_dead_member_is_let_go(store, monkeypatch):
    """gloo waits five timeouts for it, and has no connection that could be shut."""
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)  # with it groups wait when they talk
    member = Membership(("127.0.0.1", store.port), 0, 30.0)
    member._spared = sockets.open_sockets()  # the store's ends are in this process, too
    groups = member.enter(name(store, 0, (0, 1)), lambda: None)
    dist.PrefixStore("groups/0", store).set("0/1", address_of_a_dead_peer(store))
    ended = threading.Event()

    def begin():
        with contextlib.suppress(RuntimeError):
            dist.ProcessGroupGloo(groups, 0, 2, timedelta(seconds=30))
        ended.set()

    threading.Thread(target=begin, daemon=True).start()
    with contextlib.closing(member):
        assert not ended.wait(0.5)
        store.set(keys.news(0, 0, 0), keys.OVER)
        assert ended.wait(20)
        member.leave({})
