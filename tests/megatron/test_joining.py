"""A process that cannot join a job says in one sentence what it lacks."""

import socket
from types import SimpleNamespace

import pytest

from megatron_hdp.megatron import parallel

ARGUMENTS = SimpleNamespace(distributed_timeout_minutes=1, distributed_backend="gloo")
PLACE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def join(monkeypatch, **changes):
    """The words with which joining is refused."""
    for name, value in (PLACE | changes).items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as caught:
        parallel.join_job(ARGUMENTS)
    return str(caught.value)


def test_without_torchrun_it_says_how_to_start(monkeypatch):
    words = join(monkeypatch, RANK=None, WORLD_SIZE=None, MASTER_ADDR=None, MASTER_PORT=None)
    assert "RANK, WORLD_SIZE, MASTER_PORT, MASTER_ADDR" in words
    assert "torchrun --nproc-per-node 4 -m megatron_hdp.pretrain_gpt" in words


@pytest.mark.parametrize(
    "changes", [{"RANK": "1"}, {"RANK": "-1"}, {"RANK": "first"}, {"MASTER_PORT": ""}]
)
def test_a_place_that_is_none_is_refused(monkeypatch, changes):
    words = join(monkeypatch, **changes)
    assert "expected numbers with RANK < WORLD_SIZE" in words
    assert all(f"{name}={value}" in words for name, value in changes.items())


def test_a_port_in_use_is_named(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = join(monkeypatch, MASTER_PORT=port)
    assert f"MASTER_PORT={port}" in words and "address already in use" in words
