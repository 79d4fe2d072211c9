"""What Megatron leaves undefined without TransformerEngine is filled in, and taken away again."""

from unittest.mock import MagicMock

import pytest
import torch
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils

from megatron_hdp.megatron.cpu import gpu_gaps


@pytest.mark.skipif(
    hasattr(moe_utils, "te_general_gemm"),
    reason="this Megatron defines it, or TransformerEngine is here: nothing is missing",
)
def test_a_router_runs_without_transformer_engine():
    inputs = torch.randn(4, 1, 8, requires_grad=True)
    weight = torch.randn(3, 8, requires_grad=True)

    def logits() -> torch.Tensor:
        return moe_utils.router_gating_linear(inputs, weight, None, torch.float32)

    with pytest.raises(NameError):
        logits()
    gpu_gaps.fill()
    gpu_gaps.fill()
    try:
        torch.testing.assert_close(logits(), inputs @ weight.t())
        logits().sum().backward()
    finally:
        gpu_gaps.revert()
    assert not hasattr(moe_utils, "te_general_gemm")
    gpu_gaps.revert()


def test_what_is_there_stays(monkeypatch):
    monkeypatch.setattr(moe_utils, "te_general_gemm", "transformer engine's", raising=False)
    gpu_gaps.fill()
    gpu_gaps.revert()
    assert moe_utils.te_general_gemm == "transformer engine's"


@pytest.mark.parametrize(("linear", "filled"), [(MagicMock(), False), (torch.nn.Linear, True)])
def test_latent_attention_compares_with_no_class_that_is_missing(monkeypatch, linear, filled):
    monkeypatch.setattr(multi_latent_attention, "TELinear", linear)
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", True)
    gpu_gaps.fill()
    assert multi_latent_attention.HAVE_TE is filled
    gpu_gaps.fill()
    gpu_gaps.revert()
    assert multi_latent_attention.HAVE_TE is True
