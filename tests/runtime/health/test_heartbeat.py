"""Heartbeats of several ranks as threads of one process, over one store in memory.

Whose device waits is not blamed, whatever its main thread stands in; asking may hang.
"""

import threading
import time
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_hdp.runtime.clocks import DeviceClock
from megatron_hdp.runtime.gathering import EveryRankError
from megatron_hdp.runtime.health import CallsHeartbeat, calls, heartbeat, store
from megatron_hdp.runtime.health.diagnosis import Status
from megatron_hdp.runtime.health.heartbeat import Heartbeat, RankFailure, is_communication_error
from megatron_hdp.runtime.timeline import (
    CHECKPOINT,
    DEVICE_WAIT,
    FORWARD,
    MEETING,
    RING_WAIT,
    Timeline,
)
from tests.runtime.test_clocks import Device

INTERVAL_S = 0.2
LIMIT_S = 0.6
LONG_S = 20.0
DEFAULTS = {"interval_s": INTERVAL_S, "stall_timeout_s": LIMIT_S, "slow_timeout_s": LONG_S}


class LoadedMachine:
    """A clock that counts little while other work keeps this process from running."""

    TICK_S = 0.01

    def __init__(self):
        self._now_s = 1000.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def _tick(self):
        while not self._stop.wait(self.TICK_S):
            self._now_s += self.TICK_S

    def monotonic(self):
        return self._now_s

    def sleep(self, seconds):
        until_s = self._now_s + seconds
        while self._now_s < until_s:
            time.sleep(self.TICK_S)

    @contextmanager
    def running(self):
        """Within it heartbeats know no other clock."""
        self._thread.start()
        with ExitStack() as patches:
            for module in (heartbeat, store, calls):
                patches.enter_context(mock.patch.object(module, "time", self))
            yield
        self._stop.set()


class Rank(threading.Thread):
    """A rank whose main thread runs `work(rank)` under a heartbeat until `go_on` is set."""

    KIND = Heartbeat

    def __init__(self, number, world_size, store, work, **options):
        super().__init__(daemon=True)
        self.number, self._work = number, work
        self.timeline, self.go_on = Timeline(), threading.Event()
        self.ended, self.error = [], None
        place = {"store": store, "rank": number, "world_size": world_size}
        how = DEFAULTS | options | {"end_process": self.ended.append}
        self.heartbeat = self.KIND(self.timeline, **place, **how)

    def run(self):
        try:
            with self.heartbeat:
                self.heartbeat.begin_step(1)
                self.heartbeat.begin_step(2)
                self._work(self)
        except (RankFailure, ValueError) as error:
            self.error = error


class CallingRank(Rank):
    """One that runs `work(rank)` in a loop of its own and makes calls there."""

    KIND = CallsHeartbeat

    def run(self):
        self.heartbeat.begin()
        try:
            self._work(self)
        except (RankFailure, ValueError) as error:
            self.error = error
        finally:
            self.heartbeat.end()

    def call(self, work=None):
        with self.heartbeat.call("step", (EveryRankError,)):
            if work is not None:
                work(self)


def wait(rank, kind=RING_WAIT, micro_batch=4):
    with rank.timeline.span(kind, micro_batch):
        assert rank.go_on.wait(60)


def compute(rank):
    wait(rank, FORWARD, 3)


def meet(rank):
    wait(rank, MEETING)


def get_on(rank):
    while not rank.go_on.wait(LIMIT_S / 10):
        with rank.timeline.span(FORWARD, 3):
            pass


@contextmanager
def job(*work, kind=Rank, **options):
    """Ranks that run these functions; all are told to end on leaving."""
    memory, clock = dist.HashStore(), LoadedMachine()
    with clock.running():
        ranks = [kind(number, len(work), memory, one, **options) for number, one in enumerate(work)]
        for rank in ranks:
            rank.clock = clock
            rank.start()
        try:
            yield ranks
        finally:
            for rank in ranks:
                rank.go_on.set()
            for rank in ranks:
                rank.join(120)
                assert not rank.is_alive()
    for thread in threading.enumerate():
        if thread.name.startswith("heartbeat"):
            thread.join(10)
            assert not thread.is_alive(), f"{thread.name} is left over"


def ended(rank):
    """What the heartbeat said when it ended the rank's process; pytest's time limit ends a wait."""
    while not rank.ended:
        time.sleep(0.01)
    return rank.ended[0]


def still_run(ranks, seconds):
    ranks[0].clock.sleep(seconds)
    return all(not rank.ended for rank in ranks)


def test_a_rank_that_stands_still_is_named_to_all():
    with job(wait, compute, wait) as ranks:
        texts = [ended(rank) for rank in ranks]
    for text in texts:
        assert "stalled while 2 of 3 ranks wait: rank 1 (host " in text, text
        assert "in forward of micro-batch 3 of step 2" in text, text
        assert "get_on" not in text
    assert any("stack of rank" in text and "go_on.wait" in text for text in texts)


ASKED = {"stall_timeout_s": LONG_S, "asked_to_end": lambda: True}


@pytest.mark.parametrize(
    ("work", "options"),
    [((wait, get_on, wait), {}), ((compute, compute), {}), ((wait, compute, wait), ASKED)],
    ids=["one that gets on", "all compute", "asked to end: until the step is saved"],
)
def test_living_ranks_are_waited_for(work, options):
    with job(*work, **options) as ranks:
        assert still_run(ranks, 4 * LIMIT_S)


def test_saving_a_checkpoint_may_take_longer():
    def save(rank):
        with rank.timeline.span(CHECKPOINT):
            wait(rank)

    with job(save, compute) as ranks:
        assert still_run(ranks, 3 * LIMIT_S)
    with job(save, compute, slow_timeout_s=2 * LIMIT_S) as ranks:
        assert "rank 1 (host " in ended(ranks[0])


def test_ranks_that_wait_for_each_other_end():
    with job(wait, wait) as ranks:
        assert "all ranks wait for each other: rank 0" in ended(ranks[0])
        assert "ring wait of micro-batch 4 of step 2" in ended(ranks[1])


heard_of = threading.Event()


def fall_silent(rank):
    """What a killed or stopped process does; its last word is that it waits."""
    heard_of.clear()
    with rank.timeline.span(RING_WAIT):
        rank.clock.sleep(3 * INTERVAL_S)
        rank.heartbeat._others._exchange = lambda is_last: heard_of.wait(60)
        assert rank.go_on.wait(60)


@pytest.mark.parametrize("options", [{}, ASKED], ids=["stalled", "asked to end"])
def test_a_rank_that_falls_silent_is_named(options):
    """Launchers ask the others to end when they have lost a rank; no stall needs to pass."""
    with job(wait, wait, fall_silent, **options) as ranks:
        texts = [ended(rank) for rank in ranks[:2]]
        heard_of.set()
    for text in texts:
        assert "rank 2 (host " in text and "died or was stopped: no sign of life" in text, text
        assert "last in ring wait of step 2" in text and "wait for each other" not in text, text


def test_without_a_stall_nobody_looks_who_was_not_asked():
    with job(wait, wait, fall_silent, stall_timeout_s=LONG_S) as ranks:
        assert still_run(ranks, 4 * LIMIT_S)
        heard_of.set()


def test_who_waits_for_data_to_be_prepared_waits_while_the_others_live():
    patient = {"slow_timeout_s": LIMIT_S}
    with job(meet, meet, compute, **patient) as ranks:
        assert still_run(ranks, 8 * LIMIT_S)
    # the longest of all patience: 70 intervals
    with job(meet, meet, fall_silent, interval_s=INTERVAL_S / 4, **patient) as ranks:
        text = ended(ranks[0])
        heard_of.set()
    assert "rank 2 (host " in text and "died or was stopped" in text, text


def test_a_rank_that_never_came_is_named():
    rank = Rank(0, 3, dist.HashStore(), wait)
    rank.start()
    assert "rank 1 never gave a sign of life; rank 2 never" in ended(rank)
    rank.go_on.set()
    rank.join(30)


def failing(intervals, error, cause=None):
    """What raises the error after so many heartbeats."""

    def fail(rank):
        rank.clock.sleep(intervals * INTERVAL_S)
        raise error from cause

    return fail


def test_failed_communication_names_the_rank_that_failed():
    lost = ValueError("a ring member did not answer"), RuntimeError("gloo: closed")
    with job(failing(4, *lost), failing(3, ValueError("planted\nmore")), wait) as ranks:
        assert "rank 1 (host " in ended(ranks[2])
    assert type(ranks[1].error) is ValueError
    assert isinstance(ranks[0].error, RankFailure)
    for text in (str(ranks[0].error), ranks[2].ended[0]):
        assert "failed: ValueError: planted" in text and "more" not in text


def test_failed_communication_names_the_rank_that_left():
    lost = RuntimeError("[gloo/transport] Connection closed by peer")
    with job(failing(3, lost), lambda rank: None) as ranks:
        ranks[0].join(120)
    assert "rank 1 (host " in str(ranks[0].error) and "has left the job" in str(ranks[0].error)


def test_failed_communication_with_all_alive_names_the_rank_that_does_not_wait():
    late = failing(3, dist.DistBackendError("timed out"))
    with job(late, compute, wait, stall_timeout_s=LONG_S) as ranks:
        ranks[0].join(120)
        assert "rank 1 (host " in ended(ranks[2])
    assert "stalled while 2 of 3 ranks wait: rank 1 (host " in str(ranks[0].error)


def test_all_ranks_give_the_reason_that_was_told_first():
    """One that had not heard it yet would blame the rank that knew better and left."""
    stores, memory = [], dist.HashStore()
    for rank in range(2):
        status = Status("node", 2, "forward", "f, a.py:1", waits=True, still_s=1.0)
        stores.append(store.HeartbeatStore(memory, rank, 2, INTERVAL_S, status))
    first, second = stores
    first.start()
    assert first.tell("rank 3 stalled", 60) == "rank 3 stalled"
    second.start()
    assert second.tell("rank 0 has left", 60) == "rank 3 stalled"
    for one in stores:
        one.stop(60)


def test_who_leaves_has_told_why_before():
    status = Status("node", 2, "forward", "f, a.py:1", waits=True, still_s=1.0)
    others = store.HeartbeatStore(dist.HashStore(), 1, 2, INTERVAL_S, status)
    seen, real = [], others._store
    others._store = mock.Mock(wraps=real, set=lambda *_: seen.append(real.get("failure")))
    others._to_tell = "rank 0 stalled"
    others._exchange(is_last=True)
    assert seen == [b"rank 0 stalled"]


def test_leaving_in_order_ends_nobody():
    def leave(rank):
        rank.clock.sleep(rank.number * 2 * INTERVAL_S)

    with job(leave, leave, leave) as ranks:
        for rank in ranks:
            rank.join(120)
    assert [(rank.ended, rank.error) for rank in ranks] == [([], None)] * 3


def launch(rank, *kinds, query=None):
    """Puts spans into the queue of the rank's device, which does none of them; nothing waits."""
    rank.device = Device()
    rank.timeline.use(DeviceClock(rank.device.event, query))
    for kind in kinds:
        with rank.timeline.span(kind, 2):
            rank.device.launch(1.0)
    rank.device.queue.pop(0)  # it is past the beginning of the first


def launch_to_a_device_that_waits(rank):
    """Its queue is full: the main thread stands in a launch of the next forward."""
    launch(rank, RING_WAIT, FORWARD)
    wait(rank, FORWARD, 3)


def launch_to_a_device_that_computes(rank, kind=FORWARD, micro_batch=3):
    launch(rank, FORWARD, RING_WAIT)
    wait(rank, kind, micro_batch)


def read_a_result(rank):
    """Where a main thread counts as waiting, for a device that computes."""
    launch_to_a_device_that_computes(rank, DEVICE_WAIT, None)


def test_the_rank_whose_device_computes_is_blamed_alone():
    ranks = (wait, launch_to_a_device_that_waits, launch_to_a_device_that_computes)
    with job(*ranks) as ranks:
        texts = [ended(ranks[0]), ended(ranks[1])]
    for text in texts:
        assert "stalled while 2 of 3 ranks wait: rank 2 (host " in text, text
        assert "its device in forward of micro-batch 2, as" in text and "rank 1 (" not in text, text


def test_a_main_thread_that_waits_for_its_device_does_what_that_does():
    with job(launch_to_a_device_that_waits, read_a_result) as ranks:
        text = ended(ranks[0])
    assert "rank 1 (host " in text and "in wait for the device" in text, text
    assert "its device in forward of micro-batch 2" in text, text


def test_devices_that_all_wait_are_a_deadlock():
    with job(launch_to_a_device_that_waits, launch_to_a_device_that_waits) as ranks:
        assert "all ranks wait for each other: rank 0" in ended(ranks[0])


@pytest.mark.parametrize("kinds", [(FORWARD,), (FORWARD, RING_WAIT)], ids=" and ".join)
def test_a_device_that_gets_on_is_waited_for(kinds):
    """The main thread stands still for long: the queue is."""

    def get_on(rank):
        launch(rank, *kinds * 40)
        with rank.timeline.span(FORWARD, 3):
            while not rank.go_on.wait(LIMIT_S / 10):
                del rank.device.queue[:1]

    with job(wait, get_on) as ranks:
        assert still_run(ranks, 4 * LIMIT_S)


def test_a_question_that_hangs_silences_nobody():
    """And the rank is taken for what its main thread says, as no device answers."""
    may_answer = threading.Event()

    def ask_in_vain(rank):
        launch(rank, RING_WAIT, FORWARD, query=lambda event: may_answer.wait(60))
        wait(rank, FORWARD, 3)

    with job(wait, wait, ask_in_vain) as ranks:
        assert still_run(ranks, LIMIT_S / 2)
        texts = [ended(rank) for rank in ranks[:2]]
        beats = ranks[2].heartbeat._others._beats
        may_answer.set()
    assert beats > LIMIT_S / INTERVAL_S, "its heartbeats went on"
    for text in texts:
        assert "stalled while 2 of 3 ranks wait: rank 2 (host " in text, text
        assert "died" not in text and "device" not in text, text


@pytest.mark.parametrize(
    "error, expected",
    [
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc] Connection closed"), True),
        (dist.DistNetworkError("reset"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("gloo"), False),
    ],
)
def test_what_is_an_error_of_communication(error, expected):
    assert is_communication_error(error) is expected


def calling(*works):
    """What makes a call for each function and pauses for each number; the first call is empty.

    That one may take its time.
    """

    def work(rank):
        rank.call()
        for one in works:
            if isinstance(one, float):
                rank.clock.sleep(one)
            else:
                rank.call(one)
        assert rank.go_on.wait(60)

    return work


def refuse(rank):
    raise EveryRankError("no token with loss")


def test_between_two_calls_a_rank_may_do_as_it_likes():
    """Another rank waits in the next call for it; a mistake that all ranks raise ends nothing."""

    def work(rank):
        rank.call()
        with pytest.raises(EveryRankError):
            rank.call(refuse)
        if rank.number == 1:
            rank.clock.sleep(4 * LIMIT_S)
        rank.call(wait if rank.number == 0 else None)

    with job(work, work, kind=CallingRank) as ranks:
        ranks[1].join(120)
        assert not ranks[1].is_alive() and [rank.ended for rank in ranks] == [[], []]
        assert ranks[1].error is None


@pytest.mark.parametrize("act", [compute, failing(1, ValueError("planted\nmore"))])
def test_who_hangs_or_fails_in_a_call_is_named(act):
    works = [calling(2 * LIMIT_S, wait), calling(2 * LIMIT_S, act)]
    with job(*works, kind=CallingRank) as ranks:
        text = ended(ranks[0])
    names = "rank 1 (host ", "stalled while 1 of 2 ranks wait" if act is compute else "planted"
    assert all(one in text for one in names) and "more" not in text, text
    assert (ranks[1].error is None) == (act is compute)


def test_after_a_call_that_failed_no_rank_makes_another():
    def meets_it(rank):
        rank.call()
        rank.clock.sleep(5 * INTERVAL_S)
        rank.call()

    def fails(rank):
        with pytest.raises(ValueError, match="planted"):
            rank.call(failing(0, ValueError("planted")))
        rank.call()

    with job(meets_it, fails, kind=CallingRank) as ranks:
        for rank in ranks:
            rank.join(120)
    for rank in ranks:
        assert isinstance(rank.error, RankFailure) and not rank.ended
        assert "a call before has failed" in str(rank.error) and "planted" in str(rank.error)


def test_ranks_that_fail_to_communicate_in_a_call_name_the_one_that_left():
    lost = RuntimeError("[gloo/transport] Connection closed by peer")
    with job(calling(failing(3, lost)), lambda rank: rank.call(), kind=CallingRank) as ranks:
        ranks[0].join(120)
    assert "rank 1 (host " in str(ranks[0].error) and "has left the job" in str(ranks[0].error)
