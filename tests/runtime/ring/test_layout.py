"""What making a layout costs: nothing that is not asked for, and few launches for what is."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_hdp.runtime.ring.layout import TokenLayout

SLICES = (4, 2, 6)


class Operations(TorchDispatchMode):
    """Names of operations, in order: of the host, and those that a device is given."""

    def __init__(self):
        super().__init__()
        self.on_host, self.on_device = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        is_device = isinstance(result, torch.Tensor) and result.device.type == "meta"
        is_view = function.is_view
        if not is_view:
            (self.on_device if is_device else self.on_host).append(function.__name__)
        return result


def layout(device="cpu", slices=SLICES):
    return TokenLayout((0, 1), 0, slices, (7, 3), torch.device(device))


def test_nothing_is_launched_for_heads_and_tails_that_nobody_reads():
    """What TransformerEngine reads is two lots of offsets, each sent in one copy."""
    with Operations() as operations:
        made = layout("meta")
        assert not operations.on_host and not operations.on_device
        assert made.whole_segments.longest == 12 and made.local_segments.longest == 7
    assert operations.on_device == ["_to_copy.default"] * 2


def test_heads_and_tails_reach_the_device_in_one_copy():
    with Operations() as operations:
        made = layout("meta", SLICES * 50)
        assert made.heads.shape == made.tails.shape == (300,)
    assert operations.on_device == ["_to_copy.default"]
    assert len(operations.on_host) <= 3


def test_heads_and_tails_are_the_halves_of_each_slice():
    made = layout()
    assert made.heads.tolist() == [0, 1, 4, 6, 7, 8]
    assert made.tails.tolist() == [2, 3, 5, 9, 10, 11]
    assert (layout(slices=(8,)).heads, layout(slices=(8,)).tails) == (slice(0, 4), slice(4, 8))
