"""A server outlives its clients and whatever they send, and lets in its own user alone."""

import os
import socket
import struct
import threading
from contextlib import ExitStack

import orjson
import pytest

from megatron_hdp.data_plane.wire import (
    MAX_MESSAGE_BYTES,
    DataPlaneLost,
    NodeClient,
    NodeServer,
    Peer,
)
from megatron_hdp.data_plane.wire import protocol as protocol_module
from tests.support.node import Echo, client_of, framed, raw, until, was_ended


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("!I", MAX_MESSAGE_BYTES + 1),
        b"GET / HTTP/1.1\r\n\r\n",
        *map(framed, (b"{]", b"\xff\xfe", b"[1]", b"", b"[" * 10_000)),
        framed(b'{"request": "get"}')[:-3],
        b"\0\0",
    ],
    ids=[
        *("too long", "another protocol", "no json", "no utf-8", "no object", "empty", "deep"),
        *("half a message", "half a length"),
    ],
)
@pytest.mark.parametrize("hangs_up", [False, True])
def test_what_is_no_message_ends_that_connection_only(server, echo, path, sent, hangs_up):
    with client_of(path) as other, raw(path) as connection:
        connection.sendall(sent)
        if hangs_up:
            connection.shutdown(socket.SHUT_WR)
        assert was_ended(connection)
        until(lambda: len(echo.gone_ones) == 1)
        assert echo.asked == [] and len(server.clients) == 1
        assert other.call({"request": "get"}, 5.0)["answer"] == {"request": "get"}


def test_a_client_that_takes_no_answer_is_dropped(server, echo, path):
    request = framed(orjson.dumps({"request": "get", "text": "x" * 2**20}))
    with client_of(path) as other, raw(path) as connection:
        with pytest.raises(ConnectionError):
            for _ in range(100):
                connection.sendall(request)  # until the server takes no more, and then hangs up
        until(lambda: len(echo.gone_ones) == 1)
        assert other.call({"request": "get"}, 5.0)["answer"] == {"request": "get"}


def test_a_peer_of_another_user_is_refused(server, echo, path, monkeypatch, caplog):
    found = protocol_module.peer_of
    stranger = Peer(os.getpid(), os.geteuid() + 1)
    monkeypatch.setattr(protocol_module, "peer_of", lambda _: stranger)
    with raw(path) as connection:
        assert was_ended(connection)
    assert f"found user {os.geteuid() + 1} (process {os.getpid()}) at the other" in caplog.text
    assert server.clients == [] == echo.asked
    with pytest.raises(DataPlaneLost, match="found user .*, expected user"):
        NodeClient(path).open(0.3)
    monkeypatch.setattr(protocol_module, "peer_of", found)
    with client_of(path) as client:
        assert client.call({"request": "get"}, 5.0)


def test_the_kernel_says_who_is_there():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert protocol_module.peer_of(ours) == Peer(os.getpid(), os.getuid())
        assert protocol_module.require_same_user(theirs).pid == os.getpid()


def test_only_the_owner_reaches_the_socket(path, echo, server):
    assert path.stat().st_mode & 0o7777 == 0o600
    path.parent.chmod(0o755)
    with pytest.raises(ValueError, match="mode 0755, expected owner .* no permission for others"):
        NodeServer(path.with_name("other.sock"), echo)
    assert not path.with_name("other.sock").exists()


def test_a_dead_socket_is_replaced_and_a_living_server_is_not(path, echo):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = NodeServer(path, echo)
    with pytest.raises(ValueError, match="found a living server, expected none"):
        NodeServer(path, echo)
    with client_of(path) as client:
        assert client.call({"request": "get"}, 5.0)
    server.close()
    server.close()
    assert not path.exists()
    with pytest.raises(
        ValueError, match="found a path of 1.. bytes for a socket, expected at most"
    ):
        NodeServer(path.parent / ("x" * 108), echo)


def test_closing_ends_every_thread(path, echo):
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    server = NodeServer(path, echo)
    with ExitStack() as connections:
        for i in range(20):
            connection = connections.enter_context(raw(path))
            connection.sendall([b"\0\0", framed(b'{"request": "wait"}'), b""][i % 3])
        until(lambda: len(server.clients) == 20 and len(echo.asked) == 7)
        echo.may_answer.set()
        server.close()
        until(lambda: len(echo.gone_ones) == 20 and threading.active_count() <= threads)
    until(lambda: len(os.listdir("/proc/self/fd")) == descriptors)


def test_a_handler_that_does_not_end_is_named(path, echo, caplog):
    server = NodeServer(path, echo)
    with raw(path) as connection:
        connection.sendall(framed(b'{"request": "wait"}'))
        until(lambda: echo.asked)
        server.close()
    assert f"process {os.getpid()}: its request still runs" in caplog.text
    echo.may_answer.set()
    until(lambda: echo.gone_ones)


def test_a_failing_release_is_logged_and_the_server_goes_on(path, caplog):
    class Failing(Echo):
        def gone(self, client):
            super().gone(client)
            raise KeyError("segments")

    failing = Failing()
    server = NodeServer(path, failing)
    with raw(path):
        until(lambda: server.clients)
    until(lambda: not server.clients)
    assert "what it held is not released" in caplog.text
    with client_of(path) as client:
        assert client.call({"request": "get"}, 5.0)
    server.close()
