"""Attention of one rank's part of a micro-batch against full attention in float64, on any device.

The same bodies run on gloo ranks of a CPU (tests/runtime) and on several ranks of one GPU
(tests/gpu).
"""

import math

import torch
import torch.distributed as dist

from megatron_hdp.planner.parts import cut_in_parts
from megatron_hdp.planner.slices import chunk_tokens
from megatron_hdp.runtime.ring.comm import RingComm
from megatron_hdp.runtime.ring.communicator import new_ring_group
from megatron_hdp.runtime.ring.layout import TokenLayout

HEADS, KV_HEADS, SCALE = 4, 2, 0.3


def full_attention(q, k, v, window=None, sink=None):
    """Causal attention of one whole sequence ``[s, heads, d]``, by definition.

    A query sees the last `window` tokens up to itself; `sink` ``[heads]`` is one key more, without
    a value.
    """
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    everything = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
    hidden = everything.triu(1)
    if window is not None:
        hidden |= everything.tril(-window)
    scores = scores.masked_fill(hidden, -math.inf)
    if sink is None:
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    scores = torch.cat((scores, sink[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :-1], v)


def random_sequence(length, seed, head_dim, dtype, value_dim):
    """(q, k, v, dout) of one sequence in float64, with values that `dtype` holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    of_heads = (HEADS, head_dim), (KV_HEADS, head_dim), (KV_HEADS, value_dim), (HEADS, value_dim)
    shapes = [(length, *of_head) for of_head in of_heads]
    parts = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(dtype).double() for x in parts]


def reference(inputs, dout, device, rows=slice(None), window=None, sink=None):
    """Rows of (out, dq, dk, dv) of one whole sequence, and the sink's gradient by those rows."""
    inputs = [x.to(device).requires_grad_() for x in inputs]
    sink = None if sink is None else sink.detach().double().requires_grad_()
    out = full_attention(*inputs, window, sink)
    dout = dout.to(device)
    grads = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    found = [x.detach().cpu()[rows] for x in (out, *grads)]
    if sink is not None:
        of_rows = torch.zeros_like(dout)
        of_rows[rows] = dout[rows]
        found += [x.cpu() for x in torch.autograd.grad(out, sink, of_rows)]
    return found


def slice_rows(length, degree, index):
    chunk = length // (2 * degree)
    head, tail = index * chunk, (2 * degree - 1 - index) * chunk
    return torch.cat([torch.arange(head, head + chunk), torch.arange(tail, tail + chunk)])


def relative_error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def errors_of_part(
    attend,
    comm,
    ring,
    chunks,
    local_lengths,
    dtype=torch.float64,
    device="cpu",
    head_dim=8,
    window=None,
    has_sink=False,
    value_dim=None,
):
    """Relative errors of (out, dq, dk, dv) over this rank's tokens, or zeros outside the ring.

    With a sink, of its gradient by this rank's tokens besides.

    Args:
        attend: the attention backend.
        comm: the rings' communicator; None where there is no ring.
        ring: HDP ranks of the ring; a single one attends to whole sequences.
        chunks: tokens of a chunk of each ring sequence.
        local_lengths: tokens of each local sequence.
        dtype, device, head_dim, window, has_sink, value_dim: how the backend is called; a query
            sees all tokens unless a window is given, values have as many channels as keys.
    """
    rank, device = dist.get_rank(comm.group) if comm else ring[0], torch.device(device)
    if rank not in ring:
        return [0.0] * (5 if has_sink else 4)
    degree, index = len(ring), ring.index(rank)
    lengths = [2 * degree * chunk for chunk in chunks] if degree > 1 else []
    wholes = [*((n, i) for i, n in enumerate(lengths))]
    wholes += [(n, 1000 + 10 * rank + i) for i, n in enumerate(local_lengths)]
    rows = [slice_rows(length, degree, index) for length in lengths]
    rows += [torch.arange(length) for length in local_lengths]
    parts = [random_sequence(*whole, head_dim, dtype, value_dim or head_dim) for whole in wholes]
    q, k, v, dout = (
        torch.cat([part[i][r] for part, r in zip(parts, rows, strict=True)]).to(device, dtype)
        for i in range(4)
    )
    for x in (q, k, v):
        x.requires_grad_()
    slices = tuple(2 * chunk for chunk in chunks) if degree > 1 else ()
    layout = TokenLayout(tuple(ring), index, slices, tuple(local_lengths), device)
    sink = torch.linspace(-1, 2, HEADS).to(device, dtype).requires_grad_() if has_sink else None
    how = {"window": window, "sink": sink}
    how = {name: value for name, value in how.items() if value is not None}
    out = attend(q, k, v, layout, comm, SCALE, **how)
    out.backward(dout)
    expected = [
        reference(part[:3], part[3], device, of_part, window, sink)
        for part, of_part in zip(parts, rows, strict=True)
    ]
    results = [out, q.grad, k.grad, v.grad]
    wanted = [torch.cat([one[i] for one in expected]) for i in range(4)]
    if sink is not None:
        results.append(sink.grad)
        wanted.append(torch.stack([one[4] for one in expected]).sum(0))
    return [
        relative_error(found.detach().cpu().double(), right)
        for found, right in zip(results, wanted, strict=True)
    ]


def gloo_comm(timeout=None, ranks_per_node=0):
    """The rings' communicator over all ranks of a test; double with ranks per node."""
    group = new_ring_group([list(range(dist.get_world_size()))], timeout)
    return RingComm(group, ranks_per_node=ranks_per_node)


def pieces_of_rank(sharded, local, num_parts, linear_tokens, degree, index):
    """Of each part: slices and lengths, what continues, and (sequence, rows of it) of each."""
    parts = []
    for of_ring, of_rank in zip(
        cut_in_parts(sharded, num_parts, 2 * degree, linear_tokens),
        cut_in_parts(local, num_parts, 1, linear_tokens),
        strict=True,
    ):
        slices = tuple(2 * chunk_tokens(stop - first, degree) for _, first, stop in of_ring)
        lengths = tuple(stop - first for _, first, stop in of_rank)
        continues = [bool(some) and some[0].first > 0 for some in (of_ring, of_rank)]
        rows = [(i, first + slice_rows(stop - first, degree, index)) for i, first, stop in of_ring]
        rows += [(len(sharded) + i, torch.arange(first, stop)) for i, first, stop in of_rank]
        if rows:
            parts.append(((slices, lengths, *continues, 0), rows))
    return parts
