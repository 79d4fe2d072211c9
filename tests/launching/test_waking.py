"""What ends an agent's sleep: nothing is looked for while nothing happens."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_hdp.launching import waking
from megatron_hdp.launching.waking import Sleep
from megatron_hdp.runtime.epochs import keys

LONGEST_S = 60.0


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def sleep(monkeypatch, store):
    """One that is not quick, and hears who rings."""
    monkeypatch.setattr(waking, "_QUICK_S", 0.0)
    before = signal.getsignal(signal.SIGCHLD)
    with Sleep(LONGEST_S) as sleep:
        sleep.heed(store, dist.TCPStore("127.0.0.1", store.port, is_master=False))
        yield sleep
    assert signal.getsignal(signal.SIGCHLD) == before
    assert "bell" not in [thread.name for thread in threading.enumerate()]
    assert signal.set_wakeup_fd(-1) == -1


def require_end(sleep):
    begun = time.monotonic()
    sleep()
    assert time.monotonic() - begun < LONGEST_S / 2


def test_a_child_ends_it_and_whoever_rings_does(sleep, store):
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    require_end(sleep)
    child.wait()
    for _ in range(20):  # none is missed: each may come while the one before is heard
        keys.ring(store)
        require_end(sleep)
    threading.Timer(0.05, sleep.end).start()
    require_end(sleep)


def test_a_signal_that_another_thread_gets_ends_it(sleep):
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    thread = threading.Thread(target=lambda: signal.raise_signal(signal.SIGUSR1))
    thread.start()
    require_end(sleep)
    thread.join()
    signal.signal(signal.SIGUSR1, before)


def test_it_is_short_for_a_while_behind_an_event_and_long_then():
    waits, now = [], [0.0]
    poll = mock.Mock(poll=lambda wait_ms: waits.append(wait_ms))
    with (
        mock.patch.object(select, "poll", lambda: poll),
        mock.patch.object(time, "monotonic", lambda: now[0]),
        Sleep(0.5) as sleep,
    ):
        for now[0] in (0.1, 0.9, 1.1):
            sleep()
        sleep.end()
        for now[0] in (5.0, 5.9, 6.1):
            sleep()
        assert waits == [10, 10, 500, 500, 10, 500]
        for _ in range(100_000):  # the pipe is full, which holds nobody up
            sleep.end()
    with pytest.raises(OSError, match="Bad file"):
        os.write(sleep._write, b"\0")
    sleep.end()


def test_a_day_without_news_is_none():
    ear = mock.Mock()
    ear.wait.side_effect = [dist.DistStoreError("a day is over"), None, KeyboardInterrupt]
    with mock.patch.object(waking, "_LISTEN", timedelta(0)), pytest.raises(KeyboardInterrupt):
        Sleep(LONGEST_S)._listen(ear)
    assert ear.delete_key.call_count == 1
