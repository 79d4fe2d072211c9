"""NVIDIA apex's `fused_weight_gradient_mlp_cuda` on a CPU, and models that call it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from megatron.core.tensor_parallel import layers

from megatron_hdp.megatron.model import building


def wgrad_gemm_accum_fp32(input, d_output, d_weight):  # the library's names
    """Adds to `d_weight` in float32 what a layer's weights get, nothing rounded on the way."""
    assert d_weight.dtype == torch.float32 and input.dtype == d_output.dtype
    rows = [one.reshape(-1, one.shape[-1]).float() for one in (input, d_output)]
    d_weight.addmm_(rows[1].t(), rows[0])


@contextmanager
def installed() -> Iterator[None]:
    """Within it Megatron finds apex's module."""
    module = sys.modules[__name__]
    values = {"fused_weight_gradient_mlp_cuda": module, "_grad_accum_fusion_available": True}
    with mock.patch.multiple(layers, create=True, **values):
        yield


@contextmanager
def accumulating() -> Iterator[None]:
    """The same, and models under HDP use it; the reference does not."""
    made = building.transformer_config

    def with_fusion(arguments):
        config = made(arguments)
        config.gradient_accumulation_fusion = arguments.hybrid_data_parallel
        return config

    with installed(), mock.patch.object(building, "transformer_config", with_fusion):
        yield
