"""Whose device waits is not blamed, whatever its main thread stands in; asking may hang."""

import threading

import pytest

from megatron_hdp.runtime.clocks import DeviceClock
from megatron_hdp.runtime.timeline import DEVICE_WAIT, FORWARD, RING_WAIT
from tests.runtime.health.test_heartbeat import INTERVAL_S, LIMIT_S, ended, job, still_run, wait
from tests.runtime.test_clocks import Device


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
