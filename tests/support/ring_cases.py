"""Attention of one rank's part of a micro-batch against full attention in float64, on any device.

The same bodies run on gloo ranks of a CPU (tests/runtime) and on several ranks of one GPU
(tests/gpu).
"""

import math

import torch
import torch.distributed as dist

from megatron_hdp.runtime.ring.comm import RingComm
from megatron_hdp.runtime.ring.communicator import new_ring_group
from megatron_hdp.runtime.ring.layout import TokenLayout

HEADS, KV_HEADS, SCALE = 4, 2, 0.3


def full_attention(q, k, v):
    """Causal attention of one whole sequence ``[s, heads, d]``, by definition."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -math.inf).softmax(-1), v)


def random_sequence(length, seed, head_dim, dtype):
    """(q, k, v, dout) of one sequence in float64, with values that `dtype` holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(length, heads, head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    parts = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(dtype).double() for x in parts]


def reference(inputs, dout, device):
    """(out, dq, dk, dv) of one whole sequence."""
    inputs = [x.to(device).requires_grad_() for x in inputs]
    out = full_attention(*inputs)
    out.backward(dout.to(device))
    return [x.cpu() for x in (out.detach(), *(x.grad for x in inputs))]


def slice_rows(length, degree, index):
    chunk = length // (2 * degree)
    head, tail = index * chunk, (2 * degree - 1 - index) * chunk
    return torch.cat([torch.arange(head, head + chunk), torch.arange(tail, tail + chunk)])


def relative_error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def errors_of_part(
    attend, comm, ring, chunks, local_lengths, dtype=torch.float64, device="cpu", head_dim=8
):
    """Relative errors of (out, dq, dk, dv) over this rank's tokens, or zeros outside the ring.

    Args:
        attend: the attention backend.
        comm: the rings' communicator; None where there is no ring.
        ring: HDP ranks of the ring; a single one attends to whole sequences.
        chunks: tokens of a chunk of each ring sequence.
        local_lengths: tokens of each local sequence.
        dtype: what the backend is given.
        device: where it runs.
        head_dim: of queries, keys and values.
    """
    rank, device = dist.get_rank(comm.group) if comm else ring[0], torch.device(device)
    if rank not in ring:
        return [0.0] * 4
    degree, index = len(ring), ring.index(rank)
    lengths = [2 * degree * chunk for chunk in chunks] if degree > 1 else []
    wholes = [*((n, i) for i, n in enumerate(lengths))]
    wholes += [(n, 1000 + 10 * rank + i) for i, n in enumerate(local_lengths)]
    rows = [slice_rows(length, degree, index) for length in lengths]
    rows += [torch.arange(length) for length in local_lengths]
    parts = [random_sequence(*whole, head_dim, dtype) for whole in wholes]
    q, k, v, dout = (
        torch.cat([part[i][r] for part, r in zip(parts, rows, strict=True)]).to(device, dtype)
        for i in range(4)
    )
    for x in (q, k, v):
        x.requires_grad_()
    slices = tuple(2 * chunk for chunk in chunks) if degree > 1 else ()
    layout = TokenLayout(tuple(ring), index, slices, tuple(local_lengths), device)
    out = attend(q, k, v, layout, comm, SCALE)
    out.backward(dout)
    expected = [reference(part[:3], part[3], device) for part in parts]
    return [
        relative_error(
            found.detach().cpu().double(),
            torch.cat([e[i][r] for e, r in zip(expected, rows, strict=True)]),
        )
        for i, found in enumerate((out, q.grad, k.grad, v.grad))
    ]


def gloo_comm():
    """The rings' communicator over all ranks of a test."""
    return RingComm(new_ring_group([list(range(dist.get_world_size()))]))
