"""Spans and totals of a CPU and a GPU, whose events are reached later; the device's progress."""

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from megatron_hdp.runtime import clocks
from megatron_hdp.runtime.clocks import Clock, DeviceClock, DriverQuery, clock_of
from megatron_hdp.runtime.device_progress import Reached
from megatron_hdp.runtime.timeline import (
    BACKWARD,
    DEVICE_WAIT,
    FORWARD,
    RING_WAIT,
    START,
    TO_HOST,
    Timeline,
)


class Device:
    """A stream: work queues up behind the CPU and runs when somebody waits for it."""

    def __init__(self) -> None:
        self.time_s = 100.0  # its own clock, of no relation to the CPU's
        self.queue: list[float | FakeEvent] = []
        self.made = 0
        self.synchronised = 0

    def launch(self, seconds: float) -> None:
        """Queues work that takes so long."""
        self.queue.append(seconds)

    def event(self) -> "FakeEvent":
        self.made += 1
        return FakeEvent(self)

    def run_until(self, event: "FakeEvent") -> None:
        self.synchronised += 1
        while event in self.queue:
            self.run_one()

    def run_one(self) -> None:
        """Does the first thing in the queue."""
        first = self.queue.pop(0)
        if isinstance(first, FakeEvent):
            first.at_s = self.time_s
        else:
            self.time_s += first


class FakeEvent:
    """What DeviceClock needs of torch.cuda.Event, by its signatures."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.at_s: float | None = None

    def record(self, stream: None = None) -> None:
        assert self not in self.device.queue, "recorded again before its time was asked for"
        self.at_s = None
        self.device.queue.append(self)

    def synchronize(self) -> None:
        self.device.run_until(self)

    def query(self) -> bool:
        return self not in self.device.queue

    def elapsed_time(self, end_event: "FakeEvent") -> float:
        assert self.at_s is not None, "asked before the device was there"
        assert end_event.at_s is not None, "asked before the device was there"
        return (end_event.at_s - self.at_s) * 1e3


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def timeline(device):
    """A step has begun."""
    timeline = Timeline(DeviceClock(device.event))
    timeline.reset()
    return timeline


def test_a_span_lasts_as_long_as_its_work_on_the_device(device, timeline):
    with timeline.span(FORWARD, 0):
        device.launch(2.0)
        with timeline.span(RING_WAIT):
            device.launch(0.5)  # the stream stands still for a transfer
    reached = timeline.now()
    device.launch(7.0)
    assert timeline.totals_s == pytest.approx({FORWARD: 2.5, RING_WAIT: 0.5})
    assert timeline.since_start_s(reached) == pytest.approx(2.5)


def test_nothing_waits_for_the_device_inside_a_step(device, timeline):
    before = device.synchronised
    timeline.start_recording()
    for _ in range(3):
        with timeline.span(FORWARD):
            device.launch(1.0)
    timeline.now()
    assert device.synchronised == before and device.time_s == 100.0
    assert len(timeline.stop_recording()) == 3
    assert device.time_s == 103.0


def test_spans_that_the_device_has_passed_are_settled_without_waiting(device, timeline):
    """At a micro-batch's end, so that the step's end finds few, of which each takes a while."""
    timeline.start_recording()
    for kind in (FORWARD, BACKWARD):
        with timeline.span(kind):
            device.launch(1.0)
            with timeline.span(RING_WAIT):
                device.launch(0.5)
    while len(device.queue) > 5:  # until it is in the backward
        device.run_one()
    before = device.synchronised
    timeline.settle_passed()
    assert [(span.kind, span.end_s > span.start_s) for span in timeline.spans] == [
        (RING_WAIT, True),
        (FORWARD, True),
    ]
    assert len(timeline._ended) == 2 and len(device.queue) == 5, "the device was not waited for"
    assert place(timeline) == (BACKWARD, None)
    assert device.synchronised == before + 4, "once for each moment, which has passed"
    assert timeline.totals_s == pytest.approx({FORWARD: 1.5, RING_WAIT: 1.0, BACKWARD: 1.5})


def test_the_first_mark_that_is_not_passed_is_found_by_halving(device):
    asked = []
    timeline = Timeline(DeviceClock(device.event, lambda event: asked.append(1) or event.query()))
    timeline.reset()
    for _ in range(500):
        with timeline.span(FORWARD):
            device.launch(1.0)
    while len(device.queue) > 300:
        device.run_one()
    assert timeline.reached().number == 800 and len(asked) <= 11


def test_events_are_used_again(device, timeline):
    for _ in range(50):
        timeline.reset()
        for _ in range(4):
            with timeline.span(FORWARD):
                device.launch(0.1)
        reached = timeline.now()
        timeline.settle()
        assert timeline.since_start_s(reached) == pytest.approx(0.4)
    assert device.made == 1 + 2 * 4 + 1, "one to align by and those of one step"


def test_the_clocks_are_tied_together_anew_at_each_step(device, monkeypatch):
    """Planted: the device's clock jumps between two steps by an hour."""
    cpu_s = iter(range(1000, 100_000, 50))
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: float(next(cpu_s)))
    timeline = Timeline(DeviceClock(device.event))
    for _ in range(2):
        timeline.reset()
        timeline.start_recording()
        device.launch(3.0)
        with timeline.span(FORWARD, 4):
            device.launch(1.0)
        (span,) = timeline.stop_recording()
        assert span.micro_batch == 4
        found = span.start_s - timeline.started_s, span.end_s - timeline.started_s
        assert found == pytest.approx((3.0, 4.0))
        device.time_s += 3600


def test_spans_open_at_reset_keep_their_beginning(device):
    before_s, timeline = time.perf_counter(), Timeline()
    with timeline.span(START):
        timeline.use(DeviceClock(device.event))
        with timeline.span(FORWARD):
            device.launch(5.0)
            timeline.start_recording()
            timeline.reset()
            device.launch(1.0)
        with timeline.span(BACKWARD):
            device.launch(2.0)
    forward, backward, start = timeline.stop_recording()
    # the device had caught up when the step began: five seconds of its time, none of the CPU's
    assert before_s <= forward.start_s <= timeline.started_s
    assert forward.end_s - timeline.started_s == pytest.approx(1.0)
    assert backward.end_s - backward.start_s == pytest.approx(2.0)
    assert start.start_s < timeline.started_s
    assert timeline.totals_s[BACKWARD] == pytest.approx(2.0)


def test_other_threads_see_at_once_what_the_main_thread_does(device, timeline):
    seen = []
    entered, may_run, looked = (threading.Event() for _ in range(3))
    synchronize = device.run_until

    def run_until(event: FakeEvent) -> None:
        if may_run.is_set():
            entered.set()
            assert looked.wait(100)
        synchronize(event)

    device.run_until = run_until

    def look() -> None:
        assert entered.wait(100)
        seen.append(timeline.current())
        looked.set()

    watcher = threading.Thread(target=look)
    watcher.start()
    before = timeline.changes
    started = time.perf_counter()
    with timeline.span(FORWARD, 1):
        ((kind, start_s, micro_batch),) = timeline.current()
        assert (kind, micro_batch) == (FORWARD, 1) and start_s >= started
        device.launch(1000.0)
    assert timeline.changes == before + 2
    may_run.set()
    timeline.settle()
    watcher.join()
    ((kind, _, _),) = seen[0]
    assert kind == DEVICE_WAIT


def test_a_span_that_raises_is_settled_too(device, timeline):
    with pytest.raises(KeyError), timeline.span(FORWARD):
        device.launch(1.0)
        raise KeyError
    assert timeline.current() == [] and timeline.totals_s[FORWARD] == pytest.approx(1.0)


def test_the_cpu_needs_no_settling():
    timeline, clock = Timeline(), clock_of(torch.device("cpu"))
    assert type(clock) is type(timeline._clock) is Clock
    with timeline.span(FORWARD):
        pass
    assert timeline.totals_s[FORWARD] > 0 and not timeline._ended


def test_spans_nest_and_inherit_their_micro_batch():
    timeline = Timeline()
    timeline.start_recording()
    with timeline.span(FORWARD, 3), timeline.span(RING_WAIT):
        assert [(kind, m) for kind, _, m in timeline.current()] == [(FORWARD, 3), (RING_WAIT, 3)]
    inner, outer = timeline.stop_recording()
    assert (inner.kind, inner.micro_batch) == (RING_WAIT, 3)
    assert outer.start_s <= inner.start_s <= inner.end_s <= outer.end_s
    assert timeline.current() == []


def test_totals_and_spans():
    timeline = Timeline()
    for _ in range(2):
        with timeline.span(FORWARD, 0):
            pass
    first = timeline.totals_s[FORWARD]
    assert first > 0 and timeline.spans is None
    timeline.reset()
    assert timeline.totals_s[FORWARD] == 0
    assert timeline.stop_recording() == []


def test_what_runs_beside_is_kept_while_recording():
    timeline = Timeline()
    with timeline.span(FORWARD, 4), timeline.beside(TO_HOST, timeline.micro_batch):
        pass
    timeline.start_recording()
    with timeline.span(FORWARD, 5), ThreadPoolExecutor(1) as thread:
        assert timeline.micro_batch == 5
        thread.submit(copy_beside, timeline, timeline.micro_batch).result()
    assert [(span.kind, span.micro_batch) for span in timeline.stop_recording()] == [
        (TO_HOST, 5),
        (FORWARD, 5),
    ]
    assert timeline.micro_batch is None


def copy_beside(timeline, micro_batch):
    with timeline.beside(TO_HOST, micro_batch):
        pass


def place(timeline):
    reached = timeline.reached()
    return "idle" if reached.is_idle else (reached.kind, reached.micro_batch)


@pytest.mark.parametrize("wait", ["span", "marked"])
def test_the_device_is_followed_through_spans_that_have_ended(device, timeline, wait):
    assert timeline.reached() == Reached(0, None, None, is_idle=True)
    for micro_batch in (3, 4):
        with timeline.span(FORWARD, micro_batch):
            device.launch(1.0)
            with getattr(timeline, wait)(RING_WAIT):
                device.launch(0.5)
            device.launch(2.0)
    seen, numbers = [place(timeline)], []
    while device.queue:
        device.run_one()
        numbers.append(timeline.reached().number)
        if place(timeline) != seen[-1]:
            seen.append(place(timeline))
    of_one = [(FORWARD, 3), (RING_WAIT, 3), (FORWARD, 3)]
    of_other = [(kind, 4) for kind, _ in of_one]
    assert seen == [(None, None), *of_one, (None, None), *of_other, "idle"]
    assert numbers == sorted(numbers) and numbers[-1] == 8


def test_a_step_that_is_over_leaves_no_marks_and_no_events(device, timeline):
    for step in range(20):
        with timeline.span(FORWARD, 0):
            with timeline.marked(RING_WAIT):
                device.launch(0.5)
            with timeline.span(RING_WAIT):
                device.launch(0.5)
        if step % 2:
            timeline.reset()
        else:
            timeline.settle()
        assert place(timeline) == "idle" and not timeline._progress._marks
    assert timeline.reached().number == 20 * 6
    assert device.made == 1 + 6, "one to align by and those of one step"


def test_an_event_that_was_used_again_meanwhile_is_passed(device):
    """Planted: while the device is asked about a mark, the step ends and the next one begins."""
    asked, may_answer = threading.Event(), threading.Event()

    def query(event):
        asked.set()
        assert may_answer.wait(10)
        return event.query()

    timeline = Timeline(DeviceClock(device.event, query))
    timeline.reset()
    with timeline.span(FORWARD, 1):
        device.launch(1.0)
    found = []
    watcher = threading.Thread(target=lambda: found.append(timeline.reached()))
    watcher.start()
    assert asked.wait(10)
    timeline.settle()
    with timeline.span(BACKWARD, 2):  # with the events of the first span
        device.launch(1.0)
    may_answer.set()
    watcher.join()
    assert device.made == 3
    assert found[0].is_idle or found[0].number >= 2, "the first span was over"
    assert (timeline.reached().kind, timeline.reached().number) == (None, 2)


def test_a_cpu_has_no_marks():
    timeline = Timeline()
    with timeline.span(FORWARD, 1), timeline.marked(RING_WAIT):
        assert timeline.current()[-1][0] == RING_WAIT
    assert timeline.reached() is None and not timeline._progress._marks


class Driver:
    """libcuda as far as `DriverQuery` asks it; the handle of an event says what is answered."""

    def __init__(self) -> None:
        self.contexts: list[int | None] = []

    def cuCtxGetCurrent(self, pointer: object) -> int:  # noqa: N802 - the driver's names
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_void_p))[0] = 7
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:  # noqa: N802
        self.contexts.append(context.value)
        return 0

    def cuEventQuery(self, event: ctypes.c_void_p) -> int:  # noqa: N802
        return event.value or 0


def test_the_driver_is_asked_with_the_context_of_the_thread_that_computes():
    driver = Driver()
    query = DriverQuery(driver)
    passed, not_ready, failed = (SimpleNamespace(cuda_event=code) for code in (0, 600, 700))
    assert query(passed) and query(passed) and driver.contexts == [7]
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(query, not_ready).result() is False
        assert thread.submit(query, failed).result() is False
    assert driver.contexts == [7, 7], "once a thread"


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_own_clock():
    """Two matrix products, of which the second takes far longer; the CPU only launches them."""
    timeline = Timeline(clock_of(torch.device("cuda")))
    small, large = (torch.randn(n, n, device="cuda") for n in (256, 8192))
    for matrix in (small, large):
        matrix @ matrix  # the library loads its kernels
    timeline.reset()
    with timeline.span(FORWARD):
        small @ small
    launched = time.perf_counter()
    with timeline.span(BACKWARD):
        for _ in range(10):
            large @ large
    launched = time.perf_counter() - launched
    totals_s = timeline.totals_s
    assert totals_s[BACKWARD] > 10 * totals_s[FORWARD] > 0
    assert totals_s[BACKWARD] > launched
