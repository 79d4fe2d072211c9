"""TransformerEngine's own Python over stand-ins for its kernels: rings, selections, waits."""

import os
from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron_hdp.runtime.attention.backend import RunShapes
from megatron_hdp.runtime.attention.transformer_engine import TransformerEngineAttention
from megatron_hdp.runtime.attention.trial import try_out, try_out_ring
from tests.runtime.attention.test_transformer_engine import one_token
from tests.runtime.kernels.test_kernels import FakeFlashAttn
from tests.support import te_kernels, te_wheel
from tests.support.ring_cases import errors_of_part, gloo_comm

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
TOLERANCE = 2e-3  # float16 keeps 11 bits; the library merges the blocks of a ring in it
CASES = [  # ring, tokens of a chunk of each ring sequence, tokens of local sequences
    ((1, 0), [5, 33], []),
    ((1, 0), [3, 1], [7, 1]),
    ((2, 0, 1), [4], [9]),
    ((0, 2, 1), [1, 8, 2], []),
    ((3, 1, 2, 0), [6, 1], [5]),
    ((0,), [], [30, 7, 1]),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The folder of the unpacked wheel."""
    return te_wheel.unpack(tmp_path_factory.mktemp("transformer_engine"))


def errors_of_cases(library, cases, left_out=None, **sizes):
    """Body of a rank: errors of (out, dq, dk, dv) of every case; a kernel may do nothing."""
    if left_out is not None:
        setattr(te_kernels, left_out, lambda *given: None)
    te_wheel.load(library)
    attend, comm = TransformerEngineAttention(CPU), gloo_comm()
    how = {"dtype": torch.float16, "head_dim": 16} | sizes
    return [errors_of_part(attend, comm, *case, **how) for case in cases]


@pytest.mark.parametrize(
    ("num_ranks", "sizes"), [(2, {}), (3, {}), (4, {}), (3, {"head_dim": 24, "value_dim": 16})]
)
def test_rings_and_local_sequences_are_exact(run_ranks, library, num_ranks, sizes):
    """Values of another size are as in multi-latent attention."""
    cases = [case for case in CASES if len(case[0]) in (num_ranks, 1, 2)]
    for errors in run_ranks(num_ranks, errors_of_cases, library, cases, **sizes):
        assert max(map(max, errors)) < TOLERANCE, errors


@pytest.mark.parametrize(
    "kernel", ["thd_out_correction", "thd_second_half_lse_correction", "thd_grad_correction"]
)
def test_the_comparison_can_fail(run_ranks, library, kernel):
    found = run_ranks(3, errors_of_cases, library, [((2, 0, 1), [4], [9])], left_out=kernel)
    assert max(max(case) for errors in found for case in errors) > 10 * TOLERANCE


def selections(library, num_layers):
    """Body of a rank: choices of kernels of layers that attend by both kinds of calls."""
    te_wheel.load(library)
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    attend, comm = TransformerEngineAttention(CPU), gloo_comm()
    how = {"dtype": torch.float16, "head_dim": 16}
    with mock.patch.object(utils, "get_attention_backend", wraps=utils.get_attention_backend) as m:
        for _ in range(num_layers):
            errors_of_part(attend, comm, (1, 0), [5], [9], **how)
    return m.call_count


def test_layers_that_alternate_between_ring_and_local_choose_once_each(run_ranks, library):
    assert run_ranks(2, selections, library, 5) == [2, 2]


class OverCpuKernel(FakeFlashAttn):
    """With the window that TransformerEngine gives for a causal block."""

    def _flash_attn_varlen_forward(self, *given, **how):
        return super()._flash_attn_varlen_forward(*given, **_own(how))

    def _flash_attn_varlen_backward(self, *given, **how):
        rest = {name: how[name] for name in ("softcap", "alibi_slopes", "deterministic")}
        super()._flash_attn_varlen_backward(*given, **_own(how), **rest)

    flash_attn_func = flash_attn_varlen_func = varlen_bwd = None
    _flash_attn_forward = _flash_attn_backward = None


def _own(how):
    window = how["window_size_left"], how["window_size_right"]
    assert window == (-1, 0 if how["causal"] else -1)
    return {name: how[name] for name in ("dropout_p", "softmax_scale", "causal")}


def waits_of_rings(library, kernel, num_layers):
    """Body of a rank: errors, and how often the host would wait for the GPU in each layer."""
    with_flash_attn = kernel == "flash-attn"
    os.environ["NVTE_FUSED_ATTN"] = str(int(not with_flash_attn))
    te_wheel.load(library, flash_attn=OverCpuKernel("2.8.3") if with_flash_attn else None)
    attend, comm, ring = TransformerEngineAttention(CPU), gloo_comm(), (1, 0)
    with te_wheel.HostWaits(library) as waits:
        errors = [
            errors_of_part(attend, comm, ring, [5, 3], [], torch.bfloat16, head_dim=16)
            for _ in range(num_layers)
        ]
    assert attend._choices.kernel_of("ring") == kernel
    return max(map(max, errors)), sorted(waits.lines.values())


@pytest.mark.parametrize(("kernel", "waits"), [("cuDNN", []), ("flash-attn", [4, 4, 4])])
def test_where_the_host_waits_for_a_ring(run_ranks, library, kernel, waits):
    for error, found in run_ranks(2, waits_of_rings, library, kernel, 4):
        assert error < 2e-2 and found == waits


def tried(library, deterministic, shapes):
    """Body of a rank: what is said of kernels once the trials are over, or why they are refused."""
    te_wheel.load(library)
    torch.use_deterministic_algorithms(deterministic)
    attend, comm = TransformerEngineAttention(CPU), gloo_comm()
    for dtype in (torch.float16, torch.bfloat16):
        try_out(attend, replace(shapes, dtype=dtype))
        try_out_ring(attend, comm, replace(shapes, dtype=dtype))
    try:
        return attend.check(shapes)
    except ValueError as error:
        return str(error)


def test_a_rank_tries_a_ring_by_itself(run_ranks, library):
    """And asks for kernels: deterministic ones of long sequences the library does not have."""
    taken = ("local by cuDNN, ring by cuDNN",)
    heads = RunShapes(CPU, torch.float16, 16, heads=8, kv_heads=1)
    long = replace(heads, longest=65_536, tokens_per_rank=8192, num_ranks=8)
    assert run_ranks(2, tried, library, False, long) == [taken] * 2
    short = replace(heads, longest=128, tokens_per_rank=128, num_ranks=2)
    assert run_ranks(2, tried, library, True, short) == [taken] * 2
    for refused in run_ranks(2, tried, library, True, long):
        assert refused.startswith("found no deterministic kernel of it for ")


def test_one_token_with_one_head_of_keys(run_ranks, library):
    assert run_ranks(1, one_token, te_wheel.load, library) == [True]
