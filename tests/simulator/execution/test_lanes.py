"""Copies to and from the host: closed forms against the lanes layer by layer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.simulator.execution.lanes import (
    backward_s,
    forward_s,
    layers_of_rows,
    leaving_of_rows,
)


def forward_slowly(compute: float, copy: float, layers: int, leaving: int) -> float:
    """Seconds; `compute` and `copy` are one layer's."""
    now, lane, done = 0.0, 0.0, []
    for layer in range(layers):
        if layer >= 2:
            now = max(now, done[layer - 2])
        begin, now = now, now + compute
        lane = max(now, max(begin, lane) + copy) if layer < leaving else lane
        done.append(lane)
    return max(now, *done)


def backward_slowly(compute: float, copy: float, layers: int, leaving: int) -> float:
    """Likewise."""
    now, lane = 0.0, 0.0
    back: dict[int, float] = {}
    for layer in reversed(range(layers)):
        # reaching a layer, the copies of the one before it begin; its own, if nobody was before it
        for one in (layer, layer - 1):
            if 0 <= one < leaving and one not in back:
                lane = max(lane, now) + copy
                back[one] = lane
        now = max(now, back.get(layer, 0.0)) + compute
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
    slowly = forward_slowly(1, copies / 4, 6, 4), backward_slowly(2, copies / 4, 6, 4)
    assert forward_s(np.array([6.0]), one, 6, 4)[0] == forward == slowly[0]
    assert backward_s(np.array([12.0]), one, 6, 4)[0] == backward == slowly[1]


@pytest.mark.parametrize(
    ("copies", "forward", "backward"),
    [
        (3.0, 3.0, 6.0 + 1.0),  # backward waits for what left of the last layer
        (6.0, 6.0, 6.0 + 2.0),  # the end of the forward waits for all copies
        (9.0, 9.0, 6.0 + 3.0 + 2.0),
    ],
)
def test_a_chunk_of_three_layers_that_all_leave(
    copies: float, forward: float, backward: float
) -> None:
    one = np.array([copies])
    assert forward_s(np.array([3.0]), one, 3, 3)[0] == forward
    assert backward_s(np.array([6.0]), one, 3, 3)[0] == backward


@given(st.integers(1, 9), st.floats(0.1, 9), st.floats(0, 30), st.booleans())
def test_any_number_of_layers(layers: int, compute: float, copy: float, stay: bool) -> None:
    leaving = max(0, layers - 2) if stay else layers
    whole, copies = np.array([compute * layers]), np.array([copy * leaving])
    found = (slowly(compute, copy, layers, leaving) for slowly in (forward_slowly, backward_slowly))
    expected = tuple(found) if leaving else (compute * layers, compute * layers)
    assert forward_s(whole, copies, layers, leaving)[0] == pytest.approx(expected[0], rel=1e-9)
    assert backward_s(whole, copies, layers, leaving)[0] == pytest.approx(expected[1], rel=1e-9)


@pytest.mark.parametrize(
    ("num_layers", "chunks", "layers", "leaving"),
    [
        (8, 1, [8], [6]),
        (8, 2, [4, 4], [4, 2]),
        (4, 2, [2, 2], [2, 0]),
        (3, 3, [1, 1, 1], [1, 0, 0]),  # the last two of the stage stay, whatever their chunk
        (1, 1, [1], [0]),
        (5, 2, [2, 3], [2, 1]),
    ],
)
def test_which_layers_of_a_chunk_leave(
    num_layers: int, chunks: int, layers: list[int], leaving: list[int]
) -> None:
    pipeline = Pipeline(2, chunks) if chunks > 1 else Pipeline()
    rows = layers_of_rows(num_layers, pipeline)
    assert rows.tolist() == np.repeat(layers, pipeline.stages).tolist()
    found = leaving_of_rows(rows, pipeline)
    assert found.tolist() == np.repeat(leaving, pipeline.stages).tolist()


def test_stages_of_unequal_layers() -> None:
    # the first stage has 3 + 1, the second 0 + 4
    found = leaving_of_rows(np.array([3, 0, 1, 4]), Pipeline(2, 2))
    assert found.tolist() == [2, 0, 0, 2]
