"""Which ring of multi-latent attention passes on what."""

from dataclasses import dataclass

import pytest
import torch

from megatron_hdp.runtime.attention import AttentionByLatent, with_latent_ring
from megatron_hdp.runtime.attention.backend import RunShapes
from megatron_hdp.runtime.attention.selection import Selection, select_attention
from megatron_hdp.runtime.kernels import PaddedKernel
from megatron_hdp.runtime.ring import TokenLayout

CPU = torch.device("cpu")
SHAPES = RunShapes(heads=4, kv_heads=4, value_dim=8)
RING, ALONE = TokenLayout((0, 1), 0, (8,), (3,)), TokenLayout((0,), 0, (), (3,))


@dataclass
class Whole:
    """A library with a ring of its own."""

    name: str = "whole"

    def __call__(self, *given, window=None, sink=None):
        return given


def chosen(choice, backend=None):
    selection = select_attention(CPU, torch.float64, 16, shapes=SHAPES)
    if backend is not None:
        selection = Selection(backend, {})
    return with_latent_ring(selection, choice, CPU, torch.float64, 16, SHAPES).backend


def test_the_latent_travels_in_rings_alone():
    attend = chosen("latent")
    assert attend.latent_travels(RING) and not attend.latent_travels(ALONE)
    attend.decide_by(lambda _: False)
    assert attend.latent_travels(RING)  # it was asked for


def test_the_cost_model_decides_where_it_is_asked():
    attend = chosen("auto")
    assert not attend.latent_travels(RING)
    attend.decide_by(lambda layout: layout.degree == 2)
    assert attend.latent_travels(RING)


def test_keys_and_values_alone_need_no_other_ring():
    assert not isinstance(chosen("kv"), AttentionByLatent)


@pytest.mark.parametrize(("choice", "rings"), [("auto", "of either"), ("latent", "of latents")])
def test_the_name_says_what_travels(choice, rings):
    assert f", rings {rings}" in chosen(choice).name


def test_a_library_with_a_ring_of_its_own_gets_ours_beside_it():
    attend = chosen("latent", Whole())
    assert attend.name == "whole, rings of latents by torch-sdpa-cpu"
    assert isinstance(attend.latent_ring.kernel, PaddedKernel)
    assert attend(1, 2, 3, ALONE, None, 1.0) == (1, 2, 3, ALONE, None, 1.0)
