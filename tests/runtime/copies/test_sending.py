"""Copies over real sockets: a version counts only whole, cuts and strangers do no harm."""

import socket
import threading
import time

import pytest
import torch

from megatron_hdp.runtime.copies import (
    Layout,
    Listener,
    Piece,
    Sender,
    Shelf,
    Source,
    fetch,
    keeping,
    serving,
)
from megatron_hdp.runtime.copies.wire import Address, connect, send

LAYOUT = Layout(
    ("param", "exp_avg"), torch.float32, (Piece("a", 3, 7, 0), Piece("b", 0, 300_000, 4))
)
MEMBERS = (5, 6)
TIMEOUT_S = 10.0


class Pair:
    """A process that sends and one that keeps, in one."""

    def __init__(self):
        self.kept, self.state, self.reading = [], 1.0, threading.Event()
        self.reading.set()
        self.listener = Listener(
            "127.0.0.1",
            {"keep": keeping(self.kept, MEMBERS), "fetch": serving(self.kept)},
            TIMEOUT_S,
        )
        self.own = Shelf(MEMBERS[0], MEMBERS, LAYOUT)
        self.sender = self.sender_to(self.listener.address)

    def read(self, snapshot):
        assert self.reading.wait(TIMEOUT_S)
        snapshot.values.fill_(self.state)

    def sender_to(self, address, timeout_s=TIMEOUT_S):
        return Sender(self.own, self.read, address, timeout_s)

    def close(self):
        self.sender.close()
        self.listener.close()


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.close()


def sent(pair, version, keep):
    pair.state = float(version)
    pair.sender.begin(version, keep, {"step": version})
    pair.sender.wait_complete(version)


def test_two_versions_are_kept_and_pieces_fetched(pair):
    for version in range(1, 5):
        sent(pair, version, version - 1)
    (shelf,) = pair.kept
    assert pair.own.versions() == shelf.versions() == [3, 4]
    assert shelf.whole(4).facts == {"step": 4}
    for version in (3, 4):
        source = Source(pair.listener.address, version, MEMBERS, MEMBERS[0])
        part = Piece("b", 10, 20, 14)
        values = fetch(source, LAYOUT, [part], TIMEOUT_S)
        assert torch.equal(values[part], torch.full((2, 10), float(version)))
    gone = Source(pair.listener.address, 2, MEMBERS, MEMBERS[0])
    with pytest.raises(OSError):
        fetch(gone, LAYOUT, [Piece("b", 10, 20, 14)], TIMEOUT_S)


def test_reading_is_waited_for_and_ends_in_an_error_if_it_takes_too_long(pair):
    pair.reading.clear()
    pair.sender.begin(1, -1, {})
    waiter = threading.Thread(target=pair.sender.wait_read)
    waiter.start()
    waiter.join(0.1)
    assert waiter.is_alive() and pair.own.versions() == []
    pair.reading.set()
    waiter.join(TIMEOUT_S)
    assert not waiter.is_alive()
    pair.sender.wait_complete(1)
    impatient = pair.sender_to(pair.listener.address, timeout_s=0.2)
    pair.reading.clear()
    impatient.begin(2, 1, {})
    with pytest.raises(TimeoutError, match="reading the optimizer's shard"):
        impatient.wait_read()
    pair.reading.set()
    impatient.close()


def test_half_a_version_counts_for_nothing_and_is_sent_again(pair):
    sent(pair, 1, -1)
    (shelf,) = pair.kept
    first = threading.Event()
    begin = shelf.begin

    def cut_once(version, keep, facts):
        snapshot = begin(version, keep, facts)
        if not first.is_set():
            first.set()
            assert shelf.versions() == [1]
            for connection, _ in pair.listener._connections:
                connection.shutdown(socket.SHUT_RDWR)
        return snapshot

    shelf.begin = cut_once
    sent(pair, 2, 1)
    assert first.is_set() and shelf.versions() == [1, 2]
    assert torch.equal(shelf.whole(2).values, torch.full((2, LAYOUT.numel), 2.0))
    assert pair.sender.trouble is None


def test_a_neighbour_that_is_gone_is_said_and_blocks_nobody(pair):
    sent(pair, 1, -1)
    pair.listener.close()
    begun = time.monotonic()
    pair.sender.begin(2, 1, {})
    pair.sender.wait_read()
    assert time.monotonic() - begun < TIMEOUT_S / 2
    while pair.sender.trouble is None:
        assert time.monotonic() - begun < TIMEOUT_S
        time.sleep(0.01)
    assert "version 2 has not reached the neighbour" in pair.sender.trouble
    assert pair.sender.complete == 1 and pair.own.versions() == [1, 2]
    assert pair.kept[0].versions() == [1]
    pair.sender.close()
    assert time.monotonic() - begun < TIMEOUT_S


def test_strangers_are_not_let_in(pair):
    host, port, _ = pair.listener.address
    with connect(Address(host, port, "0" * 32), "keep", 1.0) as stranger, pytest.raises(OSError):
        send(stranger, {"owner": 5, "layout": LAYOUT.to_json()})
        stranger.settimeout(TIMEOUT_S)
        if not stranger.recv(1):
            raise OSError
    with socket.create_connection((host, port), 1.0) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n".ljust(256))
        assert not stranger.recv(1)
    assert pair.kept == []
    sent(pair, 1, -1)
