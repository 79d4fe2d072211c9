"""Communicators of NCCL's end before connections do, by a stand-in: no GPU has run this."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_hdp.runtime.epochs import EpochOverError, Membership, membership, nccl


class Backend:
    """Stands in for PyTorch's ProcessGroupNCCL, whose abort ends when all flags are set.

    Freeing a communicator waits for kernels of all others, as `cudaFree` does.
    """

    known: list["Backend"] = []

    def __init__(self, calls, name, error=None):
        self.calls, self.name, self.error = calls, name, error
        self.flag = threading.Event()
        self.known.append(self)

    def abort(self):
        self.flag.set()
        if self.error is not None:
            raise self.error
        for one in self.known:
            if not one.flag.wait(5.0):
                self.calls.append(f"{self.name} hangs")
                return
        self.calls.append(f"{self.name} ends")


class Group:
    """Stands in for a group, with a backend for GPUs or none."""

    def __init__(self, backend=None):
        self._backend = backend

    def _get_backend(self, device):
        assert device.type == "cuda"
        if self._backend is None:
            raise RuntimeError("No backend type associated with device type cuda")
        return self._backend


@pytest.fixture
def calls():
    return []


@pytest.fixture
def add(monkeypatch, calls):
    """Makes a group known, with a stand-in of NCCL's."""
    monkeypatch.setattr(Backend, "known", [])
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend, raising=False)

    def add(name=None, error=None):
        backend = None if name is None else Backend(calls, name, error)
        group = Group(backend)
        monkeypatch.setitem(distributed_c10d._pg_map, group, ("nccl", None))
        return backend

    return add


def test_all_are_aborted_together(add, calls):
    """Planted: one whose abort would wait for the flag of the one behind it."""
    for name in "abc":
        add(name)
    add()  # a group of gloo's
    assert nccl.Communicators().abort()
    assert sorted(calls) == ["a ends", "b ends", "c ends"]


def test_connections_are_shut_behind_communicators(add, calls, monkeypatch):
    monkeypatch.setattr(membership, "shut_connections", lambda spared: calls.append(f"{spared}"))
    add("a")
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    member = Membership(("127.0.0.1", store.port), 0, 30.0)
    member._break_waits()
    assert calls == ["a ends", str(member._spared)]
    add("b")  # made meanwhile
    member._break_waits()
    assert sorted(calls[2:4]) == ["a ends", "b ends"] and len(calls) == 5
    member.close()


def test_one_that_raises_keeps_no_other(add, calls, capfd):
    add("a", RuntimeError("NCCL error: unhandled system error"))
    add("b")
    communicators = nccl.Communicators()
    assert communicators.abort() and communicators.abort()
    assert calls == ["b ends"] * 2
    told = capfd.readouterr().err
    assert told == "megatron_hdp: an abort of NCCL's failed: NCCL error: unhandled system error\n"


def test_one_that_hangs_is_waited_for_once(add, calls, capfd):
    """Aborted again and again from two threads, it is aborted once at a time; time is bounded."""
    hanging, ends = add("a"), threading.Event()
    begun = []

    def abort():
        begun.append(1)
        ends.wait(60)

    hanging.abort = abort
    communicators = nccl.Communicators(patience_s=0.05)
    began = time.monotonic()
    threads = [threading.Thread(target=communicators.abort) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(20)
    assert not communicators.abort()
    assert time.monotonic() - began < 10 and begun == [1]
    assert capfd.readouterr().err.count("1 aborts of NCCL's have not ended after 0.05 s") == 1
    ends.set()
    while not communicators.abort():
        assert time.monotonic() - began < 20
    assert communicators.abort() and len(begun) > 1, "it may have made another communicator"


def test_without_nccl_nothing_is_aborted():
    assert not hasattr(dist, "ProcessGroupNCCL"), "PyTorch for CPUs does not have it"
    before = threading.active_count()
    assert nccl.backends() == {} and nccl.Communicators().abort()
    assert threading.active_count() == before


def test_what_is_heard_in_an_epoch_that_is_over_does_not_count(monkeypatch):
    """As an abort does: the barrier comes back, an object is made of what lies in its buffer."""
    is_over = []

    def require_ongoing():
        if is_over:
            raise EpochOverError

    def broken(*_):
        raise EOFError("Ran out of input")

    monkeypatch.setattr(dist, "barrier", lambda: "came back")
    monkeypatch.setattr(dist, "all_gather_object", broken)
    before = dist.barrier, distributed_c10d.barrier
    with nccl.hearing(require_ongoing):
        assert dist.barrier() == distributed_c10d.barrier() == "came back"
        with pytest.raises(EOFError):
            dist.all_gather_object([], 1)
        is_over.append(1)
        for call in (dist.barrier, lambda: dist.all_gather_object([], 1)):
            with pytest.raises(EpochOverError):
                call()
    assert (dist.barrier, distributed_c10d.barrier) == before


def test_settings_are_made_once_and_kept():
    environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_DISTRIBUTED_DEBUG": "info"}
    nccl.prepare(environment)
    assert {name: environment[name] for name in nccl.SETTINGS} == {
        name: value for name, (value, _) in nccl.SETTINGS.items()
    }
    nccl.prepare(environment)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("TORCH_NCCL_DESYNC_DEBUG", "1"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
    ],
)
def test_settings_that_would_end_a_rank_are_refused(name, value):
    with pytest.raises(ValueError, match=f"found {name}={value}, expected .*unset: .*"):
        nccl.prepare({name: value})
