"""Copies to and from the host: closed forms against the lanes layer by layer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hdp.simulator.execution.lanes import backward_s, forward_s


def forward_slowly(compute: float, copy: float, layers: int) -> float:
    """Seconds; `compute` and `copy` are one layer's."""
    now, lane, done = 0.0, 0.0, []
    for layer in range(layers):
        if layer >= 2:
            now = max(now, done[layer - 2])
        begin, now = now, now + compute
        lane = max(now, max(begin, lane) + copy) if layer < layers - 2 else lane
        done.append(lane)
    return max(now, *done)


def backward_slowly(compute: float, copy: float, layers: int) -> float:
    """Likewise."""
    now, lane = 0.0, 0.0
    back = dict.fromkeys(range(layers), 0.0)
    for layer in reversed(range(layers)):
        if 0 <= layer - 1 < layers - 2:  # reaching a layer, the copies of the one before it begin
            lane = max(lane, now) + copy
            back[layer - 1] = lane
        now = max(now, back[layer]) + compute
    return now


@pytest.mark.parametrize(
    ("copies", "forward", "backward"),
    [
        (0.0, 6.0, 12.0),
        (4.0, 6.0, 12.0),  # 1 a layer, as long as a layer's forward
        (5.5, 6.5, 12.0),  # the last layer begins when all copies have ended
        (8.0, 9.0, 12.0),  # 2 a layer, as long as a layer's backward
        (12.0, 13.0, 16.0),  # backward waits 1 for each of 4 layers
    ],
)
def test_six_layers(copies: float, forward: float, backward: float) -> None:
    one = np.array([copies])
    assert forward_s(np.array([6.0]), one, 6)[0] == forward == forward_slowly(1, copies / 4, 6)
    assert backward_s(np.array([12.0]), one, 6)[0] == backward == backward_slowly(2, copies / 4, 6)


@given(st.integers(1, 9), st.floats(0.1, 9), st.floats(0, 30))
def test_any_number_of_layers(layers: int, compute: float, copy: float) -> None:
    whole, copies = np.array([compute * layers]), np.array([copy * max(0, layers - 2)])
    expected = forward_slowly(compute, copy, layers) if layers > 2 else compute * layers
    assert forward_s(whole, copies, layers)[0] == pytest.approx(expected, rel=1e-9)
    expected = backward_slowly(compute, copy, layers) if layers > 2 else compute * layers
    assert backward_s(whole, copies, layers)[0] == pytest.approx(expected, rel=1e-9)
