"""Attention of micro-batches that run in parts against full attention in float64."""

import random

import pytest
import torch

from megatron_hdp.planner.parts import cut_in_parts
from megatron_hdp.planner.slices import chunk_tokens
from megatron_hdp.runtime.kernels.block import CpuFlashKernel
from megatron_hdp.runtime.ring import RingAttention
from megatron_hdp.runtime.ring.parts import EarlierKeys, part_layouts
from tests.support.ring_cases import (
    HEADS,
    SCALE,
    gloo_comm,
    random_sequence,
    reference,
    relative_error,
    slice_rows,
)

HEAD_DIM = 8


def drawn_case(seed, degree):
    """Lengths of ring sequences and of those on each rank, number of parts, what tokens take."""
    draw = random.Random(seed)
    sharded = [2 * degree * draw.randint(1, 40) for _ in range(draw.randint(0, 3))]
    local = [
        [draw.randint(1, 90) for _ in range(draw.randint(0 if sharded else 1, 4))]
        for _ in range(degree)
    ]
    return sharded if degree > 1 else [], local, draw.choice([1, 2, 3, 7]), draw.choice([0, 9, 500])


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


def errors_in_parts(seeds, has_sink=False, break_it=None):
    """Body of a rank: the largest error of (out, dq, dk, dv) over its tokens, of each case."""
    comm = gloo_comm()
    degree, index = comm.group.size(), comm.group.rank()
    return [_largest_error(comm, degree, index, seed, has_sink, break_it) for seed in seeds]


def _largest_error(comm, degree, index, seed, has_sink, break_it):
    sharded, local, num_parts, linear_tokens = drawn_case(seed, degree)
    attend, keys = RingAttention(CpuFlashKernel()), EarlierKeys()
    wholes = [(n, i) for i, n in enumerate(sharded)]
    wholes += [(n, 100 + 10 * index + i) for i, n in enumerate(local[index])]
    whole = [random_sequence(*one, HEAD_DIM, torch.float64, HEAD_DIM) for one in wholes]
    parts = pieces_of_rank(sharded, local[index], num_parts, linear_tokens, degree, index)
    ring, cpu = tuple(range(degree)), torch.device("cpu")
    layouts = part_layouts(ring, index, [told for told, _ in parts], cpu)
    sink = torch.linspace(-1, 2, HEADS, dtype=torch.float64).requires_grad_() if has_sink else None
    ran = []
    for layout, (_, rows) in zip(layouts, parts, strict=True):
        q, k, v, dout = (torch.cat([whole[i][one][of] for i, of in rows]) for one in range(4))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = attend(*inputs, layout, comm, SCALE, sink=sink, earlier=keys)
        ran.append((out, inputs, dout, rows))
    for out, _, dout, _ in ran[:: 1 if break_it == "order" else -1]:
        out.backward(dout)
    errors = []
    for out, inputs, _, rows in ran:
        expected = [reference(whole[i][:3], whole[i][3], "cpu", of, None, sink) for i, of in rows]
        found = [out.detach(), *(x.grad for x in inputs)]
        for one in range(4):
            errors.append(relative_error(found[one], torch.cat([each[one] for each in expected])))
    return max(errors, default=0.0)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_attention_in_parts_equals_full_attention(run_ranks, degree):
    results = run_ranks(degree, errors_in_parts, range(12), has_sink=degree == 2)
    assert max(error for errors in results for error in errors) < 1e-12


def test_parts_that_go_back_in_another_order_are_refused(run_ranks):
    with pytest.raises(Exception, match="another order"):
        run_ranks(1, errors_in_parts, range(12), break_it="order")
