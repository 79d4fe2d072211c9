"""Attention of micro-batches that run in parts against full attention in float64."""

import random
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron_hdp.planner.query_ratio import query_ratio_of
from megatron_hdp.runtime.kernels.block import CpuFlashKernel
from megatron_hdp.runtime.offload import ActivationOffload
from megatron_hdp.runtime.ring import HostKeys, HostRoom, RingAttention, dense, windowed
from megatron_hdp.runtime.ring.halo import Halo
from megatron_hdp.runtime.ring.parts import EarlierKeys, part_layouts
from tests.support.ring_cases import (
    HEADS,
    KV_HEADS,
    SCALE,
    gloo_comm,
    pieces_of_rank,
    random_sequence,
    reference,
    relative_error,
)

HEAD_DIM = 8


def drawn_case(seed, degree):
    """Lengths of ring sequences and of those on each rank, number of parts, what tokens take."""
    draw = random.Random(seed)
    most = draw.choice([3, 40])
    sharded = [2 * degree * draw.randint(1, most) for _ in range(draw.randint(0, 3))]
    local = [
        [draw.randint(1, 90) for _ in range(draw.randint(0 if sharded else 1, 4))]
        for _ in range(degree)
    ]
    return sharded if degree > 1 else [], local, draw.choice([1, 2, 3, 7]), draw.choice([0, 9, 500])


def run_parts(seeds, way=None, window=None, has_sink=False, break_it=None, ranks_per_node=0):
    """Body of a rank: of each case the largest error of (out, dq, dk, dv) and bytes sent.

    Args:
        seeds: of cases.
        way: "keys" or "queries" travel, whatever takes fewer bytes; "host": keys wait there.
        window: tokens that a query sees; None: all before it.
        has_sink: whether each head has a sink.
        break_it: "order": the first part goes back first; "halo": is one token short; "lse": that
            of queries that travel is not merged; "row sums": theirs are left out.
        ranks_per_node: of a double ring; 0: it is plain.
    """
    comm, planted = gloo_comm(ranks_per_node=ranks_per_node), PLANTED.get(break_it, ())
    if way is not None:
        planted = (*planted, (dense, "queries_travel", lambda *_: way == "queries"))
    with ExitStack() as stack:
        for target, name, replacement in planted:
            stack.enter_context(mock.patch.object(target, name, replacement))
        return [_run_one(comm, seed, window, has_sink, break_it, way) for seed in seeds]


def _run_one(comm, seed, window, has_sink, break_it, is_forced):
    degree, index = comm.group.size(), comm.group.rank()
    comm.bytes_sent, comm._buffers = 0, {}
    sharded, local, num_parts, linear_tokens = drawn_case(seed, degree)
    attend = RingAttention(CpuFlashKernel())
    offload = ActivationOffload([], torch.device("cpu"), lambda: iter(()))
    keys = HostKeys(HostRoom(offload)) if is_forced == "host" else EarlierKeys()
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
        out = attend(*inputs, layout, comm, SCALE, window=window, sink=sink, earlier=keys)
        ran.append((out, inputs, dout, rows))
    for out, _, dout, _ in ran[:: 1 if break_it == "order" else -1]:
        out.backward(dout)
    assert not keys._of and not offload.pool.used_bytes  # what nobody needs again is let go
    errors = []
    for out, inputs, _, rows in ran:
        expected = [reference(whole[i][:3], whole[i][3], "cpu", of, window, sink) for i, of in rows]
        found = [out.detach(), *(x.grad for x in inputs)]
        for one in range(4):
            errors.append(relative_error(found[one], torch.cat([each[one] for each in expected])))
    expected_bytes = sum(_bytes_of(layout, window) for layout in layouts)
    assert comm.bytes_sent == expected_bytes, (seed, comm.bytes_sent, expected_bytes)
    if window is None and not is_forced:  # by the memory model: twice, and gradients twice
        held = sum(buffer.numel() for buffer in comm._buffers.values())
        rows = max([0, *map(_keys_in_ring, layouts)])
        num_buffers = 9 if comm.ranks_per_node else 4
        assert held <= num_buffers * 2 * KV_HEADS * HEAD_DIM * 8 * rows
    return max(errors, default=0.0)


def _keys_in_ring(layout):
    """Keys on a member of a part and of those before it."""
    earlier = layout.earlier.get("ring")
    return layout.ring_tokens + (earlier.stop if earlier else 0)


def _bytes_of(layout, window):
    """What a member sends for a part in both passes, by the rule or by the window's reach."""
    tokens, degree = layout.ring_tokens, layout.degree
    earlier = _keys_in_ring(layout) - tokens
    key_row = 2 * KV_HEADS * HEAD_DIM * 8
    if window is None or window >= layout.longest_in_ring:
        ratio = query_ratio_of(2 * KV_HEADS * HEAD_DIM, *2 * [HEADS * HEAD_DIM], HEADS, 8)
        if tokens and dense.queries_travel(tokens, earlier, ratio):
            return (degree - 1) * round(tokens * ratio * 3 * key_row)
        return 3 * (degree - 1) * (tokens + earlier) * key_row
    head, tail, rows = layout.index, 2 * degree - 1 - layout.index, 0
    for half in layout.half_slices:

        def before(place, half=half, held=earlier * degree):
            return min(window - 1, held + place * half)

        if layout.index + 1 < degree:
            rows += 2 * before(head + 1) + before(tail)
        if layout.index > 0:
            rows += 2 * before(tail + 1) + before(head)
        earlier = 0
    return rows * key_row


@pytest.mark.parametrize("degree", [1, 3])
def test_keys_wait_on_the_host(run_ranks, degree):
    results = run_ranks(degree, run_parts, range(4), "host")
    assert max(error for errors in results for error in errors) < 1e-12


def run_each(seeds, hows):
    """Body of a rank: the largest error under each of several ways to run cases."""
    return [max(run_parts(seeds, *way, **more)) for way, more in hows]


def check_each(run_ranks, degree, num_cases, hows):
    results = run_ranks(degree, run_each, range(num_cases), hows)
    for how, *errors in zip(hows, *results, strict=True):
        assert max(errors) < 1e-12, how


@pytest.mark.parametrize(
    "degree, ranks_per_node, num_cases",
    [
        *((1, 0, 12), (2, 0, 12), (3, 0, 4)),
        *(
            pytest.param(*one, 12, marks=pytest.mark.slow)
            for one in ((3, 0), (4, 0), (4, 2), (6, 2))
        ),
    ],
)
def test_attention_in_parts_equals_full_attention(run_ranks, degree, ranks_per_node, num_cases):
    """With ranks per node the ring is double."""
    more = {"has_sink": degree == 2, "ranks_per_node": ranks_per_node}
    hows = [((way,), more) for way in (None, "keys", "queries")]
    check_each(run_ranks, degree, num_cases, hows)


@pytest.mark.parametrize(
    "degree, num_cases",
    [(1, 12), (3, 4), *(pytest.param(one, 12, marks=pytest.mark.slow) for one in (2, 3))],
)
def test_windows_reach_into_parts_before(run_ranks, degree, num_cases):
    hows = [((None, window), {"has_sink": degree == 3}) for window in (2, 9, 40, 300)]
    check_each(run_ranks, degree, num_cases, hows)


def one_token_too_early(layout, window):
    """A halo of a part whose tokens are one before those that they should be, if there are."""
    made, kept = HALO(layout, window), []
    for stretch, rows in made.kept:
        off = min(1, rows.start)
        kept.append((stretch, slice(rows.start - off, rows.stop - off)))
    return replace(made, kept=tuple(kept))


HALO = Halo.of
BY_OTHERS, GIVEN = dense.DenseAttention._output_of_others, dense._from_backward
PLANTED = {
    "halo": ((windowed.Halo, "of", one_token_too_early),),
    "lse": (
        (
            dense.DenseAttention,
            "_output_of_others",
            lambda *how: (BY_OTHERS(*how)[0], torch.zeros_like(how[-1][1])),
        ),
    ),
    "row sums": (
        (
            dense,
            "_from_backward",
            lambda found: GIVEN([found[0], 0 * found[1], *found[2:]]),
        ),
    ),
}


@pytest.mark.parametrize("fault, window", [("halo", 9), ("lse", None), ("row sums", None)])
def test_a_planted_fault_is_seen(run_ranks, fault, window):
    way = None if window else "queries"
    results = run_ranks(2, run_parts, range(12), way, window, break_it=fault)
    assert max(error for errors in results for error in errors) > 1e-3


def test_parts_that_go_back_in_another_order_are_refused(run_ranks):
    with pytest.raises(Exception, match="another order"):
        run_ranks(1, run_parts, range(12), break_it="order")
