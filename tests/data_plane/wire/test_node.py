"""Ranks ask over a socket: answers, mistakes, a server that goes and comes back."""

import os
import socket
import struct
import threading
import time
from contextlib import contextmanager

import orjson
import pytest

from megatron_hdp.data_plane.wire import (
    MAX_MESSAGE_BYTES,
    DataPlaneLost,
    NodeClient,
    NodeServer,
    Peer,
    ProtocolError,
)
from megatron_hdp.data_plane.wire import protocol as protocol_module


class Echo:
    """Answers with the request; remembers who was there and what was asked."""

    def __init__(self):
        self.asked, self.gone_ones = [], []
        self.may_answer = threading.Event()

    def __call__(self, client, request):
        self.asked.append(request)
        kind = request["request"]
        if kind == "hello":
            client.facts["rank"] = request["rank"]
        elif kind == "mistake":
            raise ValueError(request["text"])
        elif kind == "bug":
            raise KeyError("b\udcff")
        elif kind == "lost":
            raise DataPlaneLost("the planner is gone")
        elif kind == "set":
            return {"answer": {1, 2}}
        elif kind == "long":
            return {"answer": "x" * MAX_MESSAGE_BYTES}
        elif kind == "wait":
            while not self.may_answer.wait(0.01) and not client.ended.is_set():
                pass
        return {"answer": request, "rank": client.facts.get("rank")}

    def gone(self, client):
        self.gone_ones.append(client)


@pytest.fixture
def path(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path / "node.sock"


@pytest.fixture
def echo():
    return Echo()


@pytest.fixture
def server(path, echo):
    made = NodeServer(path, echo, message_s=0.5)
    yield made
    made.close()


@contextmanager
def client_of(path, timeout_s=5.0, **kwargs):
    client = NodeClient(path, timeout_s, **kwargs)
    try:
        yield client
    finally:
        client.close()


def until(condition, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)


@contextmanager
def raw(path):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5.0)
        connection.connect(str(path))
        yield connection


def was_ended(connection):
    """Wait, within the connection's 5 s, for the other side to end it."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # it left unread what came
        return True


def framed(text):
    return struct.pack("!I", len(text)) + text


def test_answers_are_those_to_the_request(server, echo, path):
    hello = {"request": "hello", "rank": 3}
    with client_of(path, hello=hello) as client, client_of(path) as other:
        assert client.greeting == {"answer": hello, "rank": 3}
        for i in range(100):
            request = {"request": "get", "i": i, "text": "å\0" * i}
            assert client.call(request, 5.0) == {"answer": request, "rank": 3}
        assert other.call({"request": "get"}, 5.0)["rank"] is None
        large = {"request": "get", "text": "x" * (MAX_MESSAGE_BYTES // 2)}
        assert client.call(large, 20.0)["answer"] == large
        assert [one.peer for one in server.clients] == [Peer(os.getpid(), os.geteuid())] * 2
    until(lambda: not server.clients)
    assert len(echo.gone_ones) == 2


def test_errors_travel_by_kind(server, path):
    with client_of(path) as client:
        with pytest.raises(ValueError, match="^found ä, expected b$"):
            client.call({"request": "mistake", "text": "found ä, expected b"}, 5.0)
        with pytest.raises(DataPlaneLost, match=r"^KeyError: 'b\\+udcff'$"):
            client.call({"request": "bug"}, 5.0)
        with pytest.raises(DataPlaneLost, match="^the planner is gone$"):
            client.call({"request": "lost"}, 5.0)
        with pytest.raises(DataPlaneLost, match="not JSON serializable: set"):
            client.call({"request": "set"}, 5.0)
        with pytest.raises(DataPlaneLost, match="found a message of 16,777,2.. bytes, expected at"):
            client.call({"request": "long"}, 5.0)
        with pytest.raises(ValueError, match="arrays travel in shared memory"):
            client.call({"request": "get", "text": "x" * MAX_MESSAGE_BYTES}, 5.0)
        assert client.call({"request": "get"}, 5.0)["answer"] == {"request": "get"}
    with pytest.raises(ValueError, match="no such rank"):
        NodeClient(path, 5.0, hello={"request": "mistake", "text": "no such rank"})


def test_a_client_waits_for_the_socket(path, echo):
    servers = []
    later = threading.Timer(0.3, lambda: servers.append(NodeServer(path, echo)))
    later.start()
    with client_of(path) as client:
        assert client.call({"request": "get"}, 5.0)["rank"] is None
    later.join(5.0)
    servers[0].close()


def test_a_client_says_what_it_waited_for(path):
    begun = time.monotonic()
    with pytest.raises(
        DataPlaneLost, match=r"node.sock: asked .* for the first connection and fou"
    ) as e:
        NodeClient(path, 0.3)
    assert "no answer within 0." in str(e.value) and "there is no such socket" in str(e.value)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(DataPlaneLost, match="nothing listens there"):
        NodeClient(path, 0.3)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        with pytest.raises(DataPlaneLost, match="it listens and does not answer the hello"):
            NodeClient(path, 0.3, hello={"request": "hello", "rank": 0})
    assert time.monotonic() - begun < 3.0


def test_no_answer_in_time_is_an_error_and_its_late_answer_is_dropped(server, echo, path):
    with client_of(path) as client:
        begun = time.monotonic()
        with pytest.raises(
            DataPlaneLost, match="for 'wait' and found no answer within 0.3 s .*is co"
        ):
            client.call({"request": "wait"}, 0.3)
        assert 0.25 < time.monotonic() - begun < 2.0
        echo.may_answer.set()
        assert client.call({"request": "next"}, 5.0)["answer"] == {"request": "next"}


def test_one_request_at_a_time_and_the_second_says_why_it_waits(server, echo, path):
    with client_of(path) as client:
        answers = []
        ask = threading.Thread(
            target=lambda: answers.append(client.call({"request": "wait"}, 10.0)), daemon=True
        )
        ask.start()
        until(lambda: echo.asked)
        with pytest.raises(DataPlaneLost, match="'report' .*another request of this process still"):
            client.call({"request": "report"}, 0.2)
        echo.may_answer.set()
        ask.join(5.0)
        assert answers and len(echo.asked) == 1


def test_threads_get_their_own_answers(server, path):
    wrong = []

    def ask(name, client):
        for i in range(50):
            request = {"request": name, "i": i}
            if client.call(request, 10.0)["answer"] != request:
                wrong.append(request)

    with client_of(path) as client:
        threads = [threading.Thread(target=ask, args=(f"t{n}", client)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20.0)
        assert not any(thread.is_alive() for thread in threads) and wrong == []


def test_a_server_that_comes_back_is_asked_again_after_hello(path, echo):
    hello = {"request": "hello", "rank": 5}
    first = NodeServer(path, echo)
    with client_of(path, hello=hello) as client:
        answers = []
        ask = threading.Thread(
            target=lambda: answers.append(client.call({"request": "wait"}, 10.0)), daemon=True
        )
        ask.start()
        until(lambda: len(echo.asked) == 2)
        first.close()
        assert not path.exists() and len(echo.gone_ones) == 1
        time.sleep(0.2)
        after = Echo()
        after.may_answer.set()
        second = NodeServer(path, after)
        ask.join(10.0)
        assert answers == [{"answer": {"request": "wait"}, "rank": 5}]
        assert after.asked == [hello, {"request": "wait"}]
        second.close()


def test_a_server_that_stays_away_is_given_up(path, echo):
    server = NodeServer(path, echo)
    with client_of(path, reconnect_s=0.4) as client:
        server.close()
        begun = time.monotonic()
        with pytest.raises(
            DataPlaneLost, match="for 'get' .* within 0.. s .there is no such socket"
        ):
            client.call({"request": "get"}, 30.0)
        assert 0.2 < time.monotonic() - begun < 3.0
        again = NodeServer(path, echo)
        assert client.call({"request": "get"}, 5.0)["answer"] == {"request": "get"}
        again.close()


def test_a_closed_client_ends_a_request_that_waits(server, echo, path):
    client = NodeClient(path, 5.0)
    ended = []

    def ask():
        try:
            client.call({"request": "wait"}, 30.0)
        except DataPlaneLost as error:
            ended.append(str(error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    until(lambda: echo.asked)
    begun = time.monotonic()
    client.close()
    thread.join(5.0)
    assert time.monotonic() - begun < 2.0 and "the client is closed" in ended[0]
    until(lambda: echo.gone_ones)  # the handler heard that it need not wait on
    with pytest.raises(DataPlaneLost, match="the client is closed"):
        client.call({"request": "get"}, 1.0)


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(struct.pack("!I", MAX_MESSAGE_BYTES + 1), id="too long"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="another protocol"),
        pytest.param(framed(b"{]"), id="no json"),
        pytest.param(framed(b"\xff\xfe"), id="no utf-8"),
        pytest.param(framed(b"[1]"), id="no object"),
        pytest.param(framed(b""), id="empty"),
        pytest.param(framed(b"[" * 10_000), id="deep"),
        pytest.param(framed(b'{"request": "get"}')[:-3], id="half a message"),
        pytest.param(b"\0\0", id="half a length"),
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


@pytest.mark.parametrize("fault", [b"{]", b"[1]"])
def test_a_client_of_a_server_that_talks_nonsense_gives_up(path, fault):
    def talk(listener):
        for _ in range(3):
            connection, _ = listener.accept()
            connection.sendall(framed(fault))
            connection.close()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(5.0)
        thread = threading.Thread(target=talk, args=(listener,), daemon=True)
        thread.start()
        with client_of(path) as client, pytest.raises(DataPlaneLost, match="plane for 'get'"):
            client.call({"request": "get"}, 0.5)


def test_a_peer_of_another_user_is_refused(server, echo, path, monkeypatch, caplog):
    found = protocol_module.peer_of
    stranger = Peer(os.getpid(), os.geteuid() + 1)
    monkeypatch.setattr(protocol_module, "peer_of", lambda _: stranger)
    with raw(path) as connection:
        assert was_ended(connection)
    assert f"found user {os.geteuid() + 1} (process {os.getpid()}) at the other" in caplog.text
    assert server.clients == [] == echo.asked
    with pytest.raises(DataPlaneLost, match="found user .*, expected user"):
        NodeClient(path, 0.3)
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
    with pytest.raises(ValueError, match="mode 0755, expected owner .* and 0700 for the folder"):
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


def test_closing_ends_every_thread_within_a_second(path, echo):
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    server = NodeServer(path, echo)
    connections = [socket.socket(socket.AF_UNIX) for _ in range(20)]
    for i, connection in enumerate(connections):
        connection.connect(str(path))
        if i % 3 == 0:
            connection.sendall(b"\0\0")
        elif i % 3 == 1:
            connection.sendall(framed(b'{"request": "wait"}'))
    until(lambda: len(server.clients) == 20 and len(echo.asked) == 7)
    begun = time.monotonic()
    server.close()
    assert time.monotonic() - begun < 1.0
    assert threading.active_count() == threads and len(echo.gone_ones) == 20
    for connection in connections:
        connection.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_handler_that_does_not_end_is_named(path, caplog):
    class Stuck(Echo):
        def __call__(self, client, request):
            self.asked.append(request)
            self.may_answer.wait(20.0)
            return {}

    stuck = Stuck()
    server = NodeServer(path, stuck)
    with raw(path) as connection:
        connection.sendall(framed(b'{"request": "get"}'))
        until(lambda: stuck.asked)
        begun = time.monotonic()
        server.close()
        assert time.monotonic() - begun < 1.5
    assert f"process {os.getpid()}: its request still runs" in caplog.text
    stuck.may_answer.set()
    until(lambda: stuck.gone_ones)


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


def test_an_error_is_a_connection_error():
    assert issubclass(ProtocolError, ConnectionError)  # a client connects again after it
