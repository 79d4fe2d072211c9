"""Spans nest, totals add up by kind, and single spans are kept only while recording."""

from megatron_hdp.runtime.timeline import FORWARD, RING_WAIT, Timeline


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


def test_a_span_that_raises_is_closed():
    timeline = Timeline()
    try:
        with timeline.span(FORWARD, 0):
            raise KeyError
    except KeyError:
        pass
    assert timeline.current() == [] and timeline.totals_s[FORWARD] > 0
