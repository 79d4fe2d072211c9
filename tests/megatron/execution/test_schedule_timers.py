"""The schedule's timers become spans of the right micro-batches, and nothing is left behind."""

from types import SimpleNamespace

import pytest

from megatron_hdp.megatron.execution.schedule_timers import Pass, noting_compute
from megatron_hdp.runtime.timeline import BACKWARD, FORWARD, PIPELINE_WAIT, RING_WAIT, Timeline


def passes_of(*passes):
    return [Pass(*one) for one in passes]


def compute(config, name):
    config.timers(name, log_level=2).start()
    config.timers(name).stop()


def test_forwards_and_backwards_are_counted_apart():
    config, timeline = SimpleNamespace(timers=None), Timeline()
    timeline.start_recording()
    with noting_compute(config, timeline, passes_of((4, 0), (None, 0), (9, 0))):
        config.timers("forward-backward", log_level=1).start(barrier=True)
        for name in ("forward", "forward", "backward", "forward", "backward", "backward"):
            compute(config, f"{name}-compute")
        config.timers("forward-backward").stop()
    found = [(span.kind, span.micro_batch) for span in timeline.stop_recording()]
    assert [m for kind, m in found if kind == FORWARD] == [4, None, 9]
    assert [m for kind, m in found if kind == BACKWARD] == [4, None, 9]
    assert [kind for kind, _ in found][2:4] == [BACKWARD, FORWARD]
    assert config.timers is None


def test_backwards_take_chunks_from_the_last_to_the_first():
    config, timeline = SimpleNamespace(timers=None), Timeline()
    timeline.start_recording()
    with noting_compute(config, timeline, passes_of((4, 0), (None, 0), (4, 1), (None, 1))):
        for name in 4 * ["forward"] + 4 * ["backward"]:
            config.timers(f"{name}-compute", log_level=2).start()
            with timeline.span(RING_WAIT):
                pass
            config.timers(f"{name}-compute").stop()
    found = [(span.kind, span.micro_batch, span.chunk) for span in timeline.stop_recording()]
    forward, backward = [0, 0, 1, 1], [1, 1, 0, 0]
    assert [chunk for kind, _, chunk in found if kind == FORWARD] == forward
    assert [chunk for kind, _, chunk in found if kind == BACKWARD] == backward
    assert [chunk for kind, _, chunk in found if kind == RING_WAIT] == forward + backward
    assert [m for kind, m, _ in found if kind == BACKWARD] == [4, None, 4, None]


def test_parts_are_timed_by_themselves_without_what_lies_between():
    config, timeline = SimpleNamespace(timers=None), Timeline()
    timeline.start_recording()
    with noting_compute(config, timeline, passes_of((4, 1, True))):
        config.timers("backward-compute").start()
        for part in (1, 0):
            with timeline.span(PIPELINE_WAIT):
                pass
            with timeline.span(BACKWARD, part=part), timeline.span(RING_WAIT):
                pass
        config.timers("backward-compute").stop()
    found = timeline.stop_recording()
    assert [span.part for span in found] == [None, 1, 1, None, 0, 0]
    assert {(span.micro_batch, span.chunk) for span in found} == {(4, 0)}
    compute_s = sum(one.end_s - one.start_s for one in found if one.kind == BACKWARD)
    assert timeline.totals_s[BACKWARD] == pytest.approx(compute_s)


def test_what_runs_inside_belongs_to_the_micro_batch():
    config, timeline = SimpleNamespace(timers=None), Timeline()
    with noting_compute(config, timeline, passes_of((4, 0))):
        config.timers("forward-compute", log_level=2).start()
        with timeline.span(RING_WAIT):
            assert [(kind, m) for kind, _, m in timeline.current()] == [
                (FORWARD, 4),
                (RING_WAIT, 4),
            ]
        config.timers("forward-compute").stop()
    assert timeline.totals_s[FORWARD] >= timeline.totals_s[RING_WAIT] > 0


def test_an_error_leaves_nothing_open():
    config, timeline = SimpleNamespace(timers="before"), Timeline()
    with pytest.raises(KeyError), noting_compute(config, timeline, passes_of((4, 0))):
        config.timers("forward-compute", log_level=2).start()
        raise KeyError
    assert timeline.current() == [] and timeline.totals_s[FORWARD] > 0
    assert config.timers == "before"


def test_a_micro_batch_too_many_is_an_error():
    config = SimpleNamespace(timers=None)
    with pytest.raises(StopIteration), noting_compute(config, Timeline(), passes_of((4, 0))):
        compute(config, "backward-compute")
        compute(config, "backward-compute")
