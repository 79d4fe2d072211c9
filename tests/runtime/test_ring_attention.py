"""Ring attention alone against full attention in float64, forward and backward."""

import math

import pytest
import torch
import torch.distributed as dist

from megatron_hdp.runtime.kernels import CpuFlashKernel, select_kernel
from megatron_hdp.runtime.layout import TokenLayout
from megatron_hdp.runtime.ring_attention import ring_attention
from megatron_hdp.runtime.ring_comm import RingComm, new_ring_group

HEADS, KV_HEADS, HEAD_DIM, SCALE = 4, 2, 8, 0.3


def full_attention(q, k, v):
    """Causal attention of one whole sequence ``[s, heads, d]``, by definition."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -math.inf).softmax(-1), v)


def random_sequence(length, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(length, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def reference(length, seed):
    """(out, dq, dk, dv) of one whole sequence."""
    *inputs, dout = random_sequence(length, seed)
    for x in inputs:
        x.requires_grad_()
    out = full_attention(*inputs)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in inputs)]


def slice_rows(length, degree, index):
    chunk = length // (2 * degree)
    head, tail = index * chunk, (2 * degree - 1 - index) * chunk
    return torch.cat([torch.arange(head, head + chunk), torch.arange(tail, tail + chunk)])


def relative_error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def attend_on_one_rank(ring, chunks, local_lengths, dtype=torch.float64):
    """Largest relative error of (out, dq, dk, dv) over this rank's tokens; (error, bytes sent)."""
    rank = dist.get_rank()
    comm = RingComm(new_ring_group([list(range(dist.get_world_size()))]))
    if rank not in ring:
        return 0.0, 0
    degree, index = len(ring), ring.index(rank)
    lengths = [2 * degree * chunk for chunk in chunks] if degree > 1 else []
    rows = [slice_rows(length, degree, index) for length in lengths]
    local = [(length, 1000 + 10 * rank + i) for i, length in enumerate(local_lengths)]
    wholes = [*zip(lengths, range(len(lengths)), strict=True), *local]
    rows += [torch.arange(length) for length in local_lengths]
    parts = [random_sequence(*whole, dtype=torch.float64) for whole in wholes]
    q, k, v, dout = (
        torch.cat([part[i][r] for part, r in zip(parts, rows, strict=True)]).to(dtype)
        for i in range(4)
    )
    for x in (q, k, v):
        x.requires_grad_()
    slices = tuple(2 * chunk for chunk in chunks) if degree > 1 else ()
    layout = TokenLayout(tuple(ring), index, slices, tuple(local_lengths))
    out = ring_attention(q, k, v, layout, comm, CpuFlashKernel(), SCALE)
    out.backward(dout)
    expected = [reference(*whole) for whole in wholes]
    errors = []
    for i, found in enumerate((out.detach(), q.grad, k.grad, v.grad)):
        whole = torch.cat([e[i][r] for e, r in zip(expected, rows, strict=True)])
        errors.append(relative_error(found.double(), whole))
    return max(errors), comm.bytes_sent


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5, 6])
def test_ring_equals_full_attention(run_ranks, degree):
    ring = list(range(degree))[::-1]  # ring order is not rank order
    results = run_ranks(degree, attend_on_one_rank, ring, chunks=[5, 1, 8], local_lengths=[7, 1])
    assert max(error for error, _ in results) < 1e-13
    if degree > 1:
        kv_row_bytes = 2 * KV_HEADS * HEAD_DIM * 8
        expected = 3 * (degree - 1) * sum((10, 2, 16)) * kv_row_bytes
        assert [sent for _, sent in results] == [expected] * degree


def test_one_ring_sequence_and_a_rank_outside_the_ring(run_ranks):
    results = run_ranks(4, attend_on_one_rank, [3, 0, 2], chunks=[9], local_lengths=[])
    assert max(error for error, _ in results) < 1e-13


def test_bfloat16_stays_near_float64(run_ranks):
    results = run_ranks(3, attend_on_one_rank, [0, 1, 2], [16], [9], dtype=torch.bfloat16)
    assert 1e-4 < max(error for error, _ in results) < 2e-2


class KernelThatForgetsTheMergedLse(CpuFlashKernel):
    """A planted fault: each block's backward uses its own log-sum-exp."""

    def backward(self, dout, q, k, v, out, lse, q_lengths, k_lengths, causal, scale):
        out, lse = self.forward(q, k, v, q_lengths, k_lengths, causal, scale)
        return super().backward(dout, q, k, v, out, lse, q_lengths, k_lengths, causal, scale)


def attend_with_a_fault():
    global CpuFlashKernel
    CpuFlashKernel = KernelThatForgetsTheMergedLse
    return attend_on_one_rank([0, 1], [4], [])


def test_a_planted_fault_is_seen(run_ranks):
    assert max(error for error, _ in run_ranks(2, attend_with_a_fault)) > 1e-3


def test_layout_refuses_odd_slices_and_rings_of_one():
    with pytest.raises(ValueError, match="each must be even"):
        TokenLayout((0, 1), 0, (3,), ())
    with pytest.raises(ValueError, match="ring of 1 rank"):
        TokenLayout((0,), 0, (4,), ())


def test_tokens_must_match_the_layout():
    layout = TokenLayout((0,), 0, (), (4,))
    x = torch.zeros(3, 1, 8)
    with pytest.raises(ValueError, match="3 tokens were given, the layout has 4"):
        ring_attention(x, x, x, layout, None, CpuFlashKernel(), 1.0)


def test_a_device_without_kernel_is_refused():
    with pytest.raises(ValueError, match="no ring attention kernel for device 'meta'"):
        select_kernel(torch.device("meta"))
