"""A cluster that is not there is told at once; one that is being started is waited for."""

import pytest

from megatron_hdp.processes.ports import free_port

connect = pytest.importorskip(
    "megatron_hdp.data_plane.cluster.connect", reason="no Ray: pip install 'megatron-hdp[ray]'"
)


@pytest.fixture
def asked(monkeypatch):
    """What Ray was asked, which fails until the third time."""
    calls = []

    def init(**options):
        calls.append(options)
        if len(calls) < 3:
            raise RuntimeError("\n no node yet \n and more")

    monkeypatch.setattr(connect.ray, "init", init)
    monkeypatch.setattr(connect.ray, "shutdown", lambda: None)
    monkeypatch.setattr(connect, "_PAUSE_S", 0.01)
    monkeypatch.setattr(connect, "_LISTENS_S", 0.1)
    return calls


def join(*arguments, **options):
    with connect.connected(*arguments, **options):
        pass


def test_a_node_that_is_being_started_is_waited_for(asked):
    join("127.0.0.1:5", 60.0, namespace="n")
    assert asked == [{"address": "127.0.0.1:5", "namespace": "n"}] * 3


def test_a_node_that_does_not_come_up_is_told(asked):
    with pytest.raises(RuntimeError, match=r"does not answer after 0 s \(no node yet\)"):
        join("127.0.0.1:5", 0.0)


@pytest.mark.parametrize(
    ("address", "why"),
    [("127.0.0.1:{}", "nobody listens there"), ("ray://127.0.0.1:{}", "Ray client server")],
)
def test_a_cluster_that_is_not_there_is_told_at_once(asked, monkeypatch, address, why):
    address = address.format(free_port())
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConnectionError, match=f"found no cluster there .*{why}.* start it") as told:
        join(None, 600.0)
    assert asked == [] and f"RAY_ADDRESS='{address}': " in str(told.value)


def test_a_cluster_that_refuses_is_asked_once(asked, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ConnectionError, match="no node yet.*RAY_AUTH_TOKEN"):
        join(None, 600.0)
    assert asked == [{"address": "auto"}]
