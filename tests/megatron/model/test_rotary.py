"""Rotary angles at given positions are those that Megatron's own embedding has there."""

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    MultimodalRotaryEmbedding,
    RotaryEmbedding,
)
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_hdp.megatron.cpu import shim
from megatron_hdp.megatron.model.rotary import OwnPositionRotaryEmbedding
from megatron_hdp.megatron.parallel import compute_device

LENGTH = 50
SETTINGS = [
    {},
    {"rotary_percent": 0.5},
    {"rotary_interleaved": True},
    {"seq_len_interpolation_factor": 4.0},
    {"rotary_base": 500_000, "rope_scaling": True},
]


@pytest.fixture(autouse=True)
def megatron_runs_here():
    if shim.needed():
        with shim.applied():
            yield
    else:
        yield


def stock_embedding(**settings):
    settings = {"kv_channels": 16, "rotary_percent": 1.0} | settings
    return RotaryEmbedding(**settings, use_cpu_initialization=True)


@pytest.mark.parametrize("settings", SETTINGS)
def test_angles_are_the_rows_of_megatrons_table(settings):
    stock = stock_embedding(**settings)
    table = stock.get_emb(LENGTH)
    positions = torch.tensor([0, 1, 2, 0, 17, 18, 49, 3, 0], device=compute_device())
    found = OwnPositionRotaryEmbedding.like(stock)(positions)
    assert torch.equal(found, table[positions])
    assert not torch.equal(found, table[: len(positions)])  # the positions matter


def test_the_stock_embedding_is_left_as_it_was():
    stock = stock_embedding()
    before = dict(vars(stock))
    own = OwnPositionRotaryEmbedding.like(stock)
    own(torch.arange(3, device=compute_device()))
    assert vars(stock) == before and type(stock) is RotaryEmbedding


def test_another_kind_of_embedding_is_refused():
    stock = MultimodalRotaryEmbedding(kv_channels=16, rotary_percent=1.0)
    with pytest.raises(ValueError, match="the model has MultimodalRotaryEmbedding"):
        OwnPositionRotaryEmbedding.like(stock)


@pytest.mark.parametrize("params", [None, PackedSeqParams(qkv_format="thd")])
def test_a_micro_batch_that_hdp_did_not_make_is_refused(params):
    own = OwnPositionRotaryEmbedding.like(stock_embedding())
    with pytest.raises(TypeError, match="run through HdpExecutor"):
        own.get_rotary_seq_len(None, None, None, None, params)
