"""Long rings by our own ring, everything else by what was chosen."""

import pytest
import torch

from megatron_hdp.runtime.attention import selection as attention
from megatron_hdp.runtime.attention.backend import RunShapes
from megatron_hdp.runtime.attention.by_degree import with_float32_rings
from megatron_hdp.runtime.attention.selection import Selection, select_attention
from megatron_hdp.runtime.kernels.block import CpuFlashKernel
from megatron_hdp.runtime.ring.attention import RingAttention
from megatron_hdp.runtime.ring.layout import TokenLayout

GPU = torch.device("cuda", 0)


class Named:
    """A backend that says who attends."""

    def __init__(self, name):
        self.name = name

    def __call__(self, q, k, v, layout, comm, scale, *, window=None, sink=None):
        return self.name


@pytest.fixture
def tried(monkeypatch):
    """What is tried out; of the packages, flash-attn does not load."""

    def no_package(*kind):
        raise ImportError("no such file")

    names, loaders = [], {name: lambda *kind, n=name: Named(n) for name in attention._LOADERS}
    monkeypatch.setattr(attention, "_LOADERS", loaders | {"flash-attn": no_package})
    monkeypatch.setattr(attention, "try_out", lambda backend, *how: names.append(backend.name))
    return names


def select(least_degree, choice="auto"):
    selection = select_attention(GPU, torch.bfloat16, 128, choice)
    return with_float32_rings(selection, least_degree, GPU, torch.bfloat16, 128, RunShapes())


@pytest.mark.parametrize("choice", ["auto", "transformer-engine"])
def test_long_rings_go_to_the_first_of_the_others_and_both_are_tried(tried, choice):
    selection = select(3, choice)
    assert str(selection) == (
        "transformer-engine, rings of 3 ranks and more by torch"
        "; not flash-attn: ImportError: no such file"
    )
    assert tried == ["transformer-engine", "torch"]

    def attends(*ring, slices=(4,)):
        layout = TokenLayout(ring, 0, slices, (2,))
        return selection.backend(None, None, None, layout, None, 1.0)

    assert attends(0, slices=()) == attends(0, 1, 2, slices=()) == "transformer-engine"
    assert attends(0, 1) == "transformer-engine"
    assert attends(0, 1, 2) == attends(3, 2, 1, 0) == "torch"


def test_without_the_flag_and_for_our_own_ring_nothing_changes(tried):
    assert select(None).backend.name == "transformer-engine" and tried == ["transformer-engine"]
    ours = Selection(RingAttention(CpuFlashKernel()), {"transformer-engine": "not here"})
    assert with_float32_rings(ours, 2, GPU, torch.bfloat16, 128, RunShapes()) is ours
    assert tried == ["transformer-engine"]


def test_where_no_kernel_serves_our_ring_the_run_does_not_begin(tried, monkeypatch):
    def no_code(*kind):
        raise RuntimeError("no kernel image")

    monkeypatch.setitem(attention._LOADERS, "torch", no_code)
    with pytest.raises(ValueError) as error:
        select(2)
    for expected in (
        "--hdp-attention flash-attn or torch",
        "flash-attn: ImportError: no such file",
        "torch: RuntimeError: no kernel image",
    ):
        assert expected in str(error.value)
