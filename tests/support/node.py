"""A node's socket for tests: a handler that answers with the request, and a peer by hand."""

import socket
import struct
import threading
import time
from contextlib import contextmanager

from megatron_hdp.data_plane.wire import MAX_MESSAGE_BYTES, DataPlaneLost, NodeClient


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
            assert self.may_answer.wait(20.0)
        return {"answer": request, "rank": client.facts.get("rank")}

    def gone(self, client):
        self.gone_ones.append(client)


@contextmanager
def client_of(path, timeout_s=5.0, **kwargs):
    client = NodeClient(path, **kwargs)
    client.open(timeout_s)
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
