"""Spans nest, totals add up by kind, and single spans are kept only while recording."""

from concurrent.futures import ThreadPoolExecutor

from megatron_hdp.runtime.timeline import FORWARD, RING_WAIT, TO_HOST, Timeline


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
