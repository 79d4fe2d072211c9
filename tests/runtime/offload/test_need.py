"""The host memory of a step is there before its first forward, whatever it is that runs."""

import pytest

from megatron_hdp.runtime.offload import saved_bytes
from megatron_hdp.runtime.offload.need import HostNeed
from megatron_hdp.runtime.offload.saved_bytes import SavedBytes
from tests.runtime.offload.test_activation_offload import TOKENS, Stack
from tests.support.devices import device_of

SAVED = SavedBytes(layers=[800, 800, 1000, 900], largest=300)
"""Of ten tokens."""


@pytest.mark.parametrize(
    "stack, loads, most_alive, expected",
    [
        ((4,), [], 1, (0, 0)),
        ((4,), [(40, 0.0)], 1, (0, 0)),
        # two of four layers leave, a storage more than the share: 40 (0.5 x 2 x 100 + 30) x 9 / 8
        ((4,), [(40, 0.5)], 1, (5850, 1200)),
        ((4,), [(40, 0.5), (80, 0.0), (8, 1.0)], 1, (5850, 1200)),
        ((4,), [(40, 0.5), (8, 1.0), (40, 0.5)], 2, (5850 + 2070, 1200)),
        ((4,), [(40, 0.5), (8, 1.0)], 4, (5850 + 2070, 1200)),
        ((4, 2), [(40, 0.5)], 1, (40 * (100 + 2 * 30) * 9 // 8, 1200)),  # each part a storage more
        ((2,), [(40, 1.0)], 1, (0, 1200)),
    ],
)
def test_by_hand(stack, loads, most_alive, expected):
    need = HostNeed(*stack)
    need.expect(SAVED, 10)
    assert need.of(loads, most_alive) == expected


def stack_that_knows():
    stack = Stack(device_of("cpu"))
    saved = saved_bytes(stack.layers, stack.layers.parameters(), lambda: stack.forward(0, tokens=8))
    stack.offload.need.expect(saved, 8)
    return stack


@pytest.mark.parametrize("ratios", [[1.0], [0.3, 0.7, 1.0, 0.01]])
def test_no_forward_asks_for_host_memory(ratios):
    stack = stack_that_knows()
    stack.offload.reserve([(TOKENS, ratio) for ratio in ratios], most_alive=len(ratios))
    held_bytes = stack.offload.pool.held_bytes
    stack.gradients(ratios)
    assert stack.offload.pool.num_late == 0
    assert stack.offload.pool.held_bytes == held_bytes < 3 * stack.offload.offloaded_bytes


def test_what_saves_more_than_the_example_is_known_to_the_next_step():
    """Planted: the example was counted wrongly, at a tenth."""
    stack = stack_that_knows()
    stack.offload.need = HostNeed(len(stack.layers))
    stack.offload.need.expect(SavedBytes(layers=[5000], largest=500), 10)
    stack.offload.reserve([(TOKENS, 1.0)])
    with pytest.warns(UserWarning, match="beyond the"):
        stack.forward(1.0)
    late = stack.offload.pool.num_late
    stack.offload.reserve([(TOKENS, 1.0)] * 3, most_alive=3)
    stack.gradients([1.0] * 3)
    assert stack.offload.pool.num_late == late > 0
