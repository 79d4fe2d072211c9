"""A rank asks: answers, mistakes, a server that is late, silent, gone or back again."""

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from megatron_hdp.data_plane.wire import (
    MAX_MESSAGE_BYTES,
    DataPlaneLost,
    NodeClient,
    NodeServer,
    Peer,
)
from tests.support.node import Echo, client_of, framed, until


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
        NodeClient(path, hello={"request": "mistake", "text": "no such rank"}).open(5.0)


def test_a_client_waits_for_the_socket(path, echo):
    servers = []
    later = threading.Timer(0.3, lambda: servers.append(NodeServer(path, echo)))
    later.start()
    with client_of(path) as client:
        assert client.call({"request": "get"}, 5.0)["rank"] is None
    later.join(5.0)
    servers[0].close()


def test_a_client_says_what_it_waited_for(path):
    def told(why, **hello):
        with pytest.raises(DataPlaneLost, match=rf"node.sock: .* the first connection .*{why}"):
            NodeClient(path, **hello).open(0.3)

    told("no answer within .*there is no such socket")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    told("nothing listens there")
    path.unlink()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        told("it listens and does not answer the hello", hello={"request": "hello", "rank": 0})


def test_no_answer_in_time_is_an_error_and_its_late_answer_is_dropped(server, echo, path):
    with client_of(path) as client:
        begun = time.monotonic()
        with pytest.raises(
            DataPlaneLost, match="for 'wait' and found no answer within .* s .*is co"
        ):
            client.call({"request": "wait"}, 0.3)
        assert time.monotonic() - begun > 0.25
        echo.may_answer.set()
        assert client.call({"request": "next"}, 5.0)["answer"] == {"request": "next"}


def test_a_request_behind_another_one_has_its_own_time_limit(server, echo, path):
    with client_of(path) as client, ThreadPoolExecutor(1) as thread:
        asked = thread.submit(client.call, {"request": "wait"}, 60.0)
        until(lambda: echo.asked)
        with pytest.raises(DataPlaneLost, match="for 'get' .* earlier request still waits"):
            client.call({"request": "get"}, 0.1)
        echo.may_answer.set()
        assert asked.result(60.0)["answer"] == {"request": "wait"}
        assert client.call({"request": "get"}, 60.0)["answer"] == {"request": "get"}


def test_threads_get_their_own_answers(server, path):
    def ask(name):
        requests = [{"request": name, "i": i} for i in range(50)]
        return [one for one in requests if client.call(one, 10.0)["answer"] != one]

    with client_of(path) as client, ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, [f"t{n}" for n in range(8)])) == [[]] * 8


def test_a_server_that_comes_back_is_asked_again_after_hello(path, echo):
    hello = {"request": "hello", "rank": 5}
    first = NodeServer(path, echo)
    with client_of(path, hello=hello) as client, ThreadPoolExecutor(1) as thread:
        asked = thread.submit(client.call, {"request": "wait"}, 10.0)
        until(lambda: len(echo.asked) == 2)
        first.close()
        assert not path.exists()
        echo.may_answer.set()
        until(lambda: len(echo.gone_ones) == 1)
        after = Echo()
        after.may_answer.set()
        second = NodeServer(path, after)
        assert asked.result(10.0) == {"answer": {"request": "wait"}, "rank": 5}
        assert after.asked == [hello, {"request": "wait"}]
        second.close()


def test_a_server_that_stays_away_is_given_up(path, echo):
    server = NodeServer(path, echo)
    with client_of(path) as client:
        server.close()
        begun = time.monotonic()
        with pytest.raises(
            DataPlaneLost, match="for 'get' .* within .* s .there is no such socket"
        ):
            client.call({"request": "get"}, 0.4)
        assert time.monotonic() - begun > 0.2
        again = NodeServer(path, echo)
        assert client.call({"request": "get"}, 5.0)["answer"] == {"request": "get"}
        again.close()


def test_a_closed_client_ends_a_request_that_waits(server, echo, path):
    client = NodeClient(path)
    client.open(5.0)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(client.call, {"request": "wait"}, 30.0)
        until(lambda: echo.asked)
        client.close()
        for call in (asked.result, lambda: client.call({"request": "get"}, 1.0)):
            with pytest.raises(DataPlaneLost, match="the client is closed"):
                call()


@pytest.mark.parametrize("fault", [b"{]", b"[1]"])
def test_a_client_of_a_server_that_talks_nonsense_gives_up(path, fault):
    def talk():
        with suppress(OSError):  # until the test is over
            while True:
                connection, _ = listener.accept()
                connection.sendall(framed(fault))
                connection.close()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(5.0)
        threading.Thread(target=talk, daemon=True).start()
        with client_of(path) as client, pytest.raises(DataPlaneLost, match="plane for 'get'"):
            client.call({"request": "get"}, 0.5)


def test_a_remedy_that_is_known_is_the_only_one(path):
    why = "found no cluster, expected one: start it"
    with pytest.raises(DataPlaneLost, match=f"answer within .* s: {why}$"):
        NodeClient(path, why_lost=lambda: why).open(60.0)
    with pytest.raises(DataPlaneLost, match=r"\(it has ended\), expected .* start the job"):
        NodeClient(path, why_lost=lambda: "it has ended").open(60.0)
