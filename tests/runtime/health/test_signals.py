"""A signal to one rank is known on all; handlers come back."""

import ctypes
import os
import signal
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.runtime.health import signals
from megatron_hdp.runtime.health.signals import SIGNALS, StopSignals
from tests.support.processes import started

CPU = torch.device("cpu")


def agreed_signals(number, count):
    """Body of a rank: what is agreed before and after rank 1 gets the signal `count` times."""
    before = [signal.getsignal(one) for one in SIGNALS]
    with StopSignals() as signals:
        agreed = [signals.agreed(CPU)]
        if dist.get_rank() == 1:
            for _ in range(count):
                os.kill(os.getpid(), number)
        agreed += [signals.agreed(CPU), signals.agreed(CPU)]
    return agreed, before == [signal.getsignal(one) for one in SIGNALS]


@pytest.mark.parametrize(
    ("number", "count"), [*((one, 1) for one in SIGNALS), (signal.SIGTERM, 3), (signal.SIGTERM, 0)]
)
def test_signals_to_one_rank_are_agreed_on_as_one(run_ranks, number, count):
    seen = number if count else None
    for agreed, restored in run_ranks(2, agreed_signals, number, count):
        assert agreed == [None, seen, seen] and restored


def wait_in_c(ready):
    """Body of a process: never returns from a call that lets no Python run in the main thread."""
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    with StopSignals():
        lock(mutex)
        ready.touch()
        lock(mutex)


def sleep(ready):
    """However late the second one is heard, it belongs to the same press of keys."""
    with mock.patch.object(signals, "_SAME_PRESS_S", 600.0), StopSignals():
        ready.touch()
        time.sleep(1.5)


@pytest.mark.parametrize(
    "body, pause_s, code",
    [(sleep, 0.1, ExitCode.DONE), (wait_in_c, 1.5, ExitCode.INTERRUPTED)],
    ids=["passed-on", "a-second-one"],
)
def test_a_second_interrupt_ends_the_process(tmp_path, body, pause_s, code):
    ready = tmp_path / "ready"
    with started(1, tmp_path, body, ready) as (process,):
        while not ready.exists():
            time.sleep(0.01)
        for _ in range(2):
            os.kill(process.process.pid, signal.SIGINT)
            time.sleep(pause_s)
        assert process.wait(30) == code, process.text()
        assert ("a second time" in process.text()) == bool(code)


def fork_and_tell():
    """Body of a rank: whether a signal to a helper that it forked counts as its own."""
    with StopSignals() as signals:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        code = os.waitpid(child, 0)[1]
        time.sleep(0.2)
        return code, signals.received()


def test_a_signal_to_a_forked_helper_is_not_the_ranks(run_ranks):
    """And the helper, which may be writing a checkpoint, goes on."""
    assert run_ranks(1, fork_and_tell) == [(0, False)]
