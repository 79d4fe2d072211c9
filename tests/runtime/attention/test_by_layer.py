"""Layers with a window or a sink by our own ring, everything else by what was chosen."""

import pytest
import torch

from megatron_hdp.runtime.attention import selection as attention
from megatron_hdp.runtime.attention.backend import RunShapes
from megatron_hdp.runtime.attention.by_layer import with_own_ring
from megatron_hdp.runtime.attention.selection import Selection, select_attention
from megatron_hdp.runtime.kernels.block import CpuFlashKernel
from megatron_hdp.runtime.ring.attention import RingAttention

GPU = torch.device("cuda", 0)


class Named:
    """A backend that says who attends, and to what."""

    def __init__(self, name):
        self.name = name

    def __call__(self, q, k, v, layout, comm, scale, *, window=None, sink=None):
        return self.name, window, sink


@pytest.fixture(autouse=True)
def loaders(monkeypatch):
    """Whatever is chosen loads and computes rightly."""
    for name in attention._LOADERS:
        monkeypatch.setitem(attention._LOADERS, name, lambda *kind, name=name: Named(name))
    monkeypatch.setattr(attention, "try_out", lambda *how: None)


def select(shapes):
    selection = select_attention(GPU, torch.bfloat16, 128, shapes=shapes)
    return with_own_ring(selection, GPU, torch.bfloat16, 128, shapes)


@pytest.mark.parametrize("shapes", [RunShapes(sink=True), RunShapes(windows=(8,))])
def test_layers_with_a_window_or_a_sink_go_to_our_ring(shapes):
    selection = select(shapes)
    assert str(selection) == "transformer-engine, layers with a window or a sink by flash-attn"
    assert selection.backend(0, 0, 0, 0, 0, 1.0) == ("transformer-engine", None, None)
    assert selection.backend(0, 0, 0, 0, 0, 1.0, sink=7) == ("flash-attn", None, 7)
    assert selection.backend(0, 0, 0, 0, 0, 1.0, window=8) == ("flash-attn", 8, None)


def test_where_no_layer_is_plain_our_ring_serves_all():
    selection = select(RunShapes(windows=(8,), plain_layers=False))
    assert str(selection) == (
        "flash-attn; not transformer-engine: every layer has a window or a sink, and its rings "
        "know neither"
    )


def test_without_sinks_and_for_our_own_ring_nothing_changes():
    assert str(select(RunShapes())) == "transformer-engine"
    ours = Selection(RingAttention(CpuFlashKernel()), {})
    assert with_own_ring(ours, GPU, torch.bfloat16, 128, RunShapes(sink=True)) is ours
