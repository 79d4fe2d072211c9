"""Long rings, windows, sinks and latents by our own ring, everything else by what was chosen."""

from dataclasses import replace

import pytest
import torch

from megatron_hdp.runtime.attention import AttentionByLatent, RunShapes, with_latent_ring
from megatron_hdp.runtime.attention.selection import Selection, select_attention
from megatron_hdp.runtime.attention.several import with_float32_rings, with_own_ring
from megatron_hdp.runtime.kernels import CpuFlashKernel, PaddedKernel
from megatron_hdp.runtime.ring import RingAttention, TokenLayout
from tests.runtime.attention.test_selection import ON_GPU, Loaders

OF_LATENTS = RunShapes(torch.device("cpu"), torch.float64, 16, heads=4, kv_heads=4, value_dim=8)
RING, ALONE = TokenLayout((0, 1), 0, (8,), (3,)), TokenLayout((0,), 0, (), (3,))
OURS = Selection(RingAttention(CpuFlashKernel()), {"transformer-engine": "not here"})


def by_degree(least_degree, choice="auto"):
    return with_float32_rings(select_attention(ON_GPU, choice), least_degree, ON_GPU)


@pytest.mark.parametrize("choice", ["auto", "transformer-engine"])
def test_long_rings_go_to_the_first_of_the_others_and_both_are_tried(monkeypatch, choice):
    loaders = Loaders(monkeypatch, flash_attn=ImportError("no such file"))
    selection = by_degree(3, choice)
    assert str(selection) == (
        "transformer-engine, rings of 3 ranks and more by torch"
        "; not flash-attn: ImportError: no such file"
    )
    assert [one.name for one in loaders.tried] == ["transformer-engine", "torch"]

    def attends(*ring, slices=(4,)):
        layout = TokenLayout(ring, 0, slices, (2,))
        return selection.backend(None, None, None, layout, None, 1.0)[0]

    assert attends(0, slices=()) == attends(0, 1, 2, slices=()) == "transformer-engine"
    assert attends(0, 1) == "transformer-engine"
    assert attends(0, 1, 2) == attends(3, 2, 1, 0) == "torch"


def test_where_no_kernel_serves_our_ring_the_run_does_not_begin(monkeypatch):
    Loaders(monkeypatch, flash_attn=ImportError("no file"), torch=RuntimeError("no kernel image"))
    with pytest.raises(ValueError) as error:
        by_degree(2)
    for expected in (
        "--hdp-attention flash-attn or torch",
        "flash-attn: ImportError: no file",
        "torch: RuntimeError: no kernel image",
    ):
        assert expected in str(error.value)


def by_layer(**kinds):
    shapes = replace(ON_GPU, **kinds)
    return with_own_ring(select_attention(shapes), shapes)


@pytest.mark.parametrize("kinds", [{"sink": True}, {"windows": (8,)}])
def test_layers_with_a_window_or_a_sink_go_to_our_ring(monkeypatch, kinds):
    Loaders(monkeypatch)
    selection = by_layer(**kinds)
    assert str(selection) == "transformer-engine, layers with a window or a sink by flash-attn"
    assert selection.backend(0, 0, 0, 0, 0, 1.0) == ("transformer-engine", None, None)
    assert selection.backend(0, 0, 0, 0, 0, 1.0, sink=7) == ("flash-attn", None, 7)
    assert selection.backend(0, 0, 0, 0, 0, 1.0, window=8) == ("flash-attn", 8, None)


def test_where_no_layer_is_plain_our_ring_serves_all(monkeypatch):
    Loaders(monkeypatch)
    assert str(by_layer(windows=(8,), plain_layers=False)) == (
        "flash-attn; not transformer-engine: every layer has a window or a sink, and its rings "
        "know neither"
    )


def test_without_such_rings_and_layers_and_for_our_own_ring_nothing_changes(monkeypatch):
    loaders = Loaders(monkeypatch)
    assert by_degree(None).backend.name == str(by_layer()) == "transformer-engine"
    assert with_float32_rings(OURS, 2, ON_GPU) is OURS
    assert with_own_ring(OURS, replace(ON_GPU, sink=True)) is OURS
    assert {one.name for one in loaders.tried} == {"transformer-engine"}


def by_latent(choice, selection=None):
    return with_latent_ring(selection or select_attention(OF_LATENTS), choice, OF_LATENTS).backend


def test_the_latent_travels_in_rings_alone():
    attend = by_latent("latent")
    assert ", rings of latents" in attend.name
    assert attend.latent_travels(RING) and not attend.latent_travels(ALONE)
    attend.decide_by(lambda _: False)
    assert attend.latent_travels(RING)  # it was asked for
    assert not isinstance(by_latent("kv"), AttentionByLatent)


def test_the_cost_model_decides_where_it_is_asked():
    attend = by_latent("auto")
    assert ", rings of either" in attend.name
    assert not attend.latent_travels(RING)
    attend.decide_by(lambda layout: layout.degree == 2)
    assert attend.latent_travels(RING)


def test_a_library_with_a_ring_of_its_own_gets_ours_beside_it(monkeypatch):
    Loaders(monkeypatch)
    whole = select_attention(ON_GPU)
    monkeypatch.undo()
    attend = by_latent("latent", whole)
    assert attend.name == "transformer-engine, rings of latents by torch-sdpa-cpu"
    assert isinstance(attend.latent_ring.kernel, PaddedKernel)
    assert attend(1, 2, 3, ALONE, None, 1.0) == ("transformer-engine", None, None)
