"""Block kernels: those of a CPU against each other and float64, those of GPUs by shapes."""

import sys
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_hdp.runtime.kernels import matmul
from megatron_hdp.runtime.kernels.block import CpuFlashKernel
from megatron_hdp.runtime.kernels.flash import FlashAttnKernel, TorchFlashKernel, refusal
from megatron_hdp.runtime.kernels.matmul import MatmulKernel
from megatron_hdp.runtime.kernels.segments import Segments
from tests.support.ring_cases import relative_error

CPU = torch.device("cpu")
CASES = {"causal": ((5, 1, 40), (5, 1, 40), True), "rectangular": ((6, 3), (2, 9), False)}


def block(case, dtype=torch.float64):
    """Arguments of a block's forward, and the gradient of its output."""
    q_lengths, k_lengths, causal = CASES[case]
    random = torch.Generator().manual_seed(1)
    tokens = [(sum(q_lengths), 4), (sum(k_lengths), 2), (sum(k_lengths), 2), (sum(q_lengths), 4)]
    q, k, v, dout = (
        torch.randn(*shape, 16, generator=random, dtype=torch.float64) for shape in tokens
    )
    segments = [Segments.of(lengths, CPU) for lengths in (q_lengths, k_lengths)]
    return [x.to(dtype) for x in (q, k, v)], [*segments, causal, 0.25], dout.to(dtype)


def results_of(kernel, case, dtype=torch.float64):
    """(out, lse, dq, dk, dv) of a block."""
    inputs, how, dout = block(case, dtype)
    out, lse = kernel.forward(*inputs, *how)
    return [out, lse, *kernel.backward(dout, *inputs, out, lse, *how)]


@pytest.mark.parametrize("case", CASES)
def test_the_plain_kernel_agrees_with_the_cpu_kernel(case):
    for found, expected in zip(
        results_of(MatmulKernel(), case), results_of(CpuFlashKernel(), case), strict=True
    ):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert relative_error(found, expected) < 1e-14


def test_the_plain_kernel_in_chunks_gives_the_same(monkeypatch):
    whole = results_of(MatmulKernel(), "causal")
    monkeypatch.setattr(matmul, "_MAX_SCORES", 4 * 40 * 7)  # 7 queries at a time, of 40
    for found, expected in zip(results_of(MatmulKernel(), "causal"), whole, strict=True):
        assert relative_error(found, expected) < 1e-14


def test_the_plain_kernel_computes_low_precision_in_float32():
    found, exact = (results_of(MatmulKernel(), "causal", d) for d in (torch.bfloat16, torch.double))
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32
    assert max(relative_error(f.double(), e) for f, e in zip(found, exact, strict=True)) < 1e-2


def fake(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="cuda")


def fake_segments(lengths):
    offsets = fake(len(lengths) + 1, dtype=torch.int32)
    return Segments(lengths, offsets, offsets, max(lengths))


def test_torch_flash_kernel_by_shapes():
    """Strides as they come: v may be a view of fused projections."""
    kernel = TorchFlashKernel()
    with FakeTensorMode():
        q = fake(24, 4, 64)
        of_fused = torch.empty_strided((24, 2, 64), (2 * 192, 192, 1), dtype=q.dtype, device="cuda")
        for k, v, k_lengths in (
            (fake(24, 2, 64), of_fused, (16, 8)),
            (fake(12, 2, 64), fake(12, 2, 64), (8, 4)),
        ):
            q_segments, k_segments = fake_segments((16, 8)), fake_segments(k_lengths)
            out, lse = kernel.forward(q, k, v, q_segments, k_segments, False, 0.1)
            assert out.shape == q.shape and out.dtype == q.dtype
            assert lse.shape == (24, 4) and lse.dtype == torch.float32
            assert lse.stride() == (1, 24)  # backward reads [heads, t] without a copy
            dq, dk, dv = kernel.backward(out, q, k, v, out, lse, q_segments, k_segments, False, 0.1)
            assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)


class FakeFlashAttn(types.ModuleType):
    """The package flash-attn with its functions' signatures (2.7 to 2.8), over the CPU kernel."""

    def __init__(self, version):
        super().__init__("flash_attn")
        self.__version__ = version
        self.flash_attn_interface = self
        self.max_lengths = []

    def _flash_attn_varlen_forward(
        self,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
        block_table=None,
        leftpad_k=None,
        seqused_k=None,
    ):
        assert dropout_p == 0.0 and (window_size_left, window_size_right) == (-1, -1)
        self.max_lengths.append((max_seqlen_q, max_seqlen_k))
        how = (_segments(cu_seqlens_q), _segments(cu_seqlens_k), causal, softmax_scale)
        out, lse = CpuFlashKernel().forward(q, k, v, *how)
        return out, lse.t().contiguous(), None, None

    def _flash_attn_varlen_backward(
        self,
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state=None,
    ):
        assert softmax_lse.is_contiguous() and softmax_lse.shape == (q.shape[1], q.shape[0])
        how = (_segments(cu_seqlens_q), _segments(cu_seqlens_k), causal, softmax_scale)
        grads = CpuFlashKernel().backward(dout, q, k, v, out, softmax_lse.t(), *how)
        for into, grad in zip((dq, dk, dv), grads, strict=True):
            into.copy_(grad)


def _segments(offsets):
    return Segments.of(tuple(n for n in offsets.diff().tolist() if n), CPU)  # none of empty ones


@pytest.fixture
def flash_attn(monkeypatch):
    def install(version):
        package = FakeFlashAttn(version)
        monkeypatch.setitem(sys.modules, "flash_attn", package)
        return package

    return install


@pytest.mark.parametrize("case", CASES)
def test_flash_attn_is_called_as_it_wants_to_be(flash_attn, case):
    package = flash_attn("2.8.3")
    kernel = FlashAttnKernel()
    assert kernel.name == "flash-attn 2.8.3"
    found = results_of(kernel, case)
    q_lengths, k_lengths, _ = CASES[case]
    assert package.max_lengths == [(max(q_lengths), max(k_lengths))]
    for one, expected in zip(found, results_of(CpuFlashKernel(), case), strict=True):
        assert torch.equal(one, expected)


def test_an_old_flash_attn_is_refused(flash_attn):
    flash_attn("2.6.3")
    with pytest.raises(ValueError, match=r"found flash-attn 2\.6\.3, expected 2\.7 or newer"):
        FlashAttnKernel()


def test_what_flash_kernels_do_not_take():
    assert refusal(torch.bfloat16, 128) is None
    assert "found float32" in refusal(torch.float32, 128)
    assert "found head dimension 60" in refusal(torch.float16, 60)
    assert "found head dimension 264" in refusal(torch.float16, 264)
