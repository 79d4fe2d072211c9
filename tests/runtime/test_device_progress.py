"""Another thread sees what the device is doing, however far ahead the main thread launches."""

import threading

import pytest

from megatron_hdp.runtime.clocks import DeviceClock
from megatron_hdp.runtime.device_progress import Reached
from megatron_hdp.runtime.timeline import BACKWARD, FORWARD, RING_WAIT, Timeline
from tests.runtime.test_clocks import Device


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def timeline(device):
    timeline = Timeline(DeviceClock(device.event))
    timeline.reset()
    return timeline


def run_one(device):
    """The device does the first thing in its queue."""
    first = device.queue.pop(0)
    if isinstance(first, float):
        device.time_s += first
    else:
        first.at_s = device.time_s


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
        run_one(device)
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
