"""A ring of latents against full attention over whole sequences in float64, by definition."""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_hdp.runtime.kernels.block import CpuFlashKernel
from megatron_hdp.runtime.kernels.padded import PaddedKernel
from megatron_hdp.runtime.ring import dense
from megatron_hdp.runtime.ring import latent as module
from megatron_hdp.runtime.ring.latent import LatentRing
from megatron_hdp.runtime.ring.layout import TokenLayout
from megatron_hdp.runtime.ring.parts import EarlierKeys, part_layouts
from tests.support.ring_cases import gloo_comm, pieces_of_rank, relative_error, slice_rows

HEADS, PLAIN, ROTATED, VALUE, RANK, SCALE = 3, 4, 2, 5, 7, 0.3
CHUNKS, LOCAL = [5, 1, 4], [7, 1]
CHUNKS_IN_PARTS = [3, 40]
MADE_HEADS = (0, 1, 2)


def weight():
    generator = torch.Generator().manual_seed(9)
    size = (HEADS * (PLAIN + VALUE), RANK)
    return torch.randn(size, generator=generator, dtype=torch.float64)


def random_sequence(length, seed):
    """(q, latent, rotated, dout) of one whole sequence."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (HEADS, PLAIN + ROTATED), (RANK,), (ROTATED,), (HEADS, VALUE)
    return [torch.randn(length, *size, generator=generator, dtype=torch.float64) for size in sizes]


def reference(q, latent, rotated, dout):
    """(out, dq, dlatent, drotated, dweight) of one whole sequence, head by head."""
    inputs = [x.clone().requires_grad_() for x in (q, latent, rotated, weight())]
    q, latent, rotated, projection = inputs
    future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    outs = []
    for head, rows in enumerate(projection.chunk(HEADS)):
        keys = torch.cat((latent @ rows[:PLAIN].t(), rotated), -1)
        scores = (q[:, head] @ keys.t() * SCALE).masked_fill(future, -math.inf)
        outs.append(scores.softmax(-1) @ (latent @ rows[PLAIN:].t()))
    out = torch.stack(outs, 1)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def errors_and_bytes(ring, made_heads=0):
    """Body of a rank: errors of (out, dq, dlatent, drotated), of the summed dweight; bytes sent."""
    comm, rank = gloo_comm(), dist.get_rank()
    degree, index = len(ring), ring.index(rank)
    lengths = [2 * degree * chunk for chunk in CHUNKS] if degree > 1 else []
    wholes = [random_sequence(length, i) for i, length in enumerate(lengths)]
    wholes += [random_sequence(n, 1000 + 10 * rank + i) for i, n in enumerate(LOCAL)]
    rows = [slice_rows(length, degree, index) for length in lengths]
    rows += [torch.arange(length) for length in LOCAL]
    *inputs, dout = (
        torch.cat([whole[i][r] for whole, r in zip(wholes, rows, strict=True)]) for i in range(4)
    )
    inputs = [x.requires_grad_() for x in (*inputs, weight())]
    slices = tuple(2 * chunk for chunk in CHUNKS) if degree > 1 else ()
    layout = TokenLayout(tuple(ring), index, slices, tuple(LOCAL))
    attend = LatentRing(PaddedKernel(CpuFlashKernel()))
    out = attend(*inputs, layout, comm, SCALE, made_heads=made_heads)
    *found, dweight = (out.detach(), *torch.autograd.grad(out, inputs, dout))
    expected = [reference(*whole) for whole in wholes]
    errors = [
        relative_error(one, torch.cat([e[i][r] for e, r in zip(expected, rows, strict=True)]))
        for i, one in enumerate(found)
    ]
    # the weight's gradient is a sum over the ranks: of ring sequences once, of local ones each own
    total, local = dweight.clone(), sum(e[4] for e in expected[len(lengths) :])
    dist.all_reduce(total)
    dist.all_reduce(local)
    right = local + sum(e[4] for e in expected[: len(lengths)])
    return [*errors, relative_error(total, right)], comm.bytes_sent


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_a_ring_of_latents_equals_full_attention(run_ranks, degree):
    ring = list(range(degree))[::-1]  # ring order is not rank order
    tokens = sum(2 * chunk for chunk in CHUNKS)
    found = run_ranks(degree, of_several, [(errors_and_bytes, ring, made) for made in MADE_HEADS])
    for of_rank in found:
        for (errors, sent), made in zip(of_rank, MADE_HEADS, strict=True):
            assert max(errors) < 1e-13, (made, errors)
            values = RANK + ROTATED + made * (PLAIN + VALUE)
            assert sent == 3 * (degree - 1) * tokens * values * 8


def of_several(calls):
    """Body of a rank: what each of these calls returns."""
    return [function(*arguments) for function, *arguments in calls]


def errors_in_parts(way, num_parts, made_heads=0):
    """Body of a rank: errors as above, in parts; tokens that keys and values were made of.

    A head's, by all heads.
    """
    comm, made = gloo_comm(), []
    degree, index = comm.group.size(), comm.group.rank()

    def noting(self, latent, first_head):
        made.append(latent.shape[0] * (HEADS - first_head))
        return MADE(self, latent, first_head)

    lengths = [2 * degree * chunk for chunk in CHUNKS_IN_PARTS]
    wholes = [random_sequence(length, i) for i, length in enumerate(lengths)]
    wholes += [random_sequence(n, 1000 + 10 * index + i) for i, n in enumerate(LOCAL)]
    parts = pieces_of_rank(lengths, LOCAL, num_parts, 9, degree, index)
    told, ring = [one for one, _ in parts], tuple(range(degree))
    layouts = part_layouts(ring, index, told, torch.device("cpu"))
    attend, keys, projection = LatentRing(PaddedKernel(CpuFlashKernel())), EarlierKeys(), weight()
    projection.requires_grad_()
    ran = []
    with (
        mock.patch.object(dense, "queries_travel", lambda *_: way == "queries"),
        mock.patch.object(module._Projection, "project", noting),
    ):
        for layout, (_, rows) in zip(layouts, parts, strict=True):
            *given, dout = (torch.cat([wholes[i][one][of] for i, of in rows]) for one in range(4))
            inputs = [x.requires_grad_() for x in given]
            out = attend(*inputs, projection, layout, comm, SCALE, keys, made_heads)
            ran.append((out, inputs, dout, rows))
        for out, _, dout, _ in ran[::-1]:
            out.backward(dout)
    expected, errors = [reference(*whole) for whole in wholes], []
    for out, inputs, _, rows in ran:
        found = [out.detach(), *(x.grad for x in inputs)]
        for one in range(4):
            right = torch.cat([expected[i][one][of] for i, of in rows])
            errors.append(relative_error(found[one], right))
    total, local = projection.grad.clone(), sum(e[4] for e in expected[len(lengths) :])
    dist.all_reduce(total)
    dist.all_reduce(local)
    right = local + sum(e[4] for e in expected[: len(lengths)])
    stay = sum(one.ring_tokens + one.earlier["ring"].stop for one in layouts if one.earlier)
    return max([*errors, relative_error(total, right)]), sum(made), stay


@pytest.mark.parametrize("degree", [2, 3])
def test_parts_of_a_ring_of_latents_equal_full_attention(run_ranks, degree):
    """Where queries travel, keys and values are made once for all that pass by; so are heads'."""
    ways = [("keys", 4), ("queries", 4), ("keys", 4, 2), ("queries", 4, 2)]
    for of_rank in run_ranks(degree, of_several, [(errors_in_parts, *way) for way in ways]):
        assert max(error for error, _, _ in of_rank) < 1e-13, of_rank
        by_keys, by_queries, by_both, by_queries_again = (made for _, made, _ in of_rank)
        stay = HEADS * of_rank[0][2]
        assert by_keys - by_queries >= 2 * (degree - 2) * stay + stay, (by_keys, by_queries, stay)
        assert by_both < by_keys and by_queries_again == by_queries


def learning_of_own_tokens(self, dk, dv, latent):
    """Takes a gradient back, of which the projection learns what is this rank's own alone."""
    before = self.dweight.clone()
    found = GRADIENTS(self, dk, dv, latent)
    if latent.shape[0] != sum(2 * chunk for chunk in CHUNKS) + sum(LOCAL):
        self.dweight = before
    return found


GRADIENTS, MADE = module._Projection.gradients, module._Projection.project


def with_a_fault(ring):
    module._Projection.gradients = learning_of_own_tokens
    return errors_and_bytes(ring)


def test_a_planted_fault_is_seen(run_ranks):
    for errors, _ in run_ranks(2, with_a_fault, [0, 1]):
        assert max(errors[:4]) < 1e-13 and errors[4] > 1e-3


def test_a_frozen_projection_gets_no_gradient():
    layout = TokenLayout((0,), 0, (), (6,))
    q, latent, rotated, dout = random_sequence(6, 1)
    frozen = weight()
    out = LatentRing(PaddedKernel(CpuFlashKernel()))(
        q, latent.requires_grad_(), rotated, frozen, layout, None, SCALE
    )
    out.backward(dout)
    assert frozen.grad is None and latent.grad is not None


def test_tokens_must_match_the_layout():
    q, latent, rotated, _ = random_sequence(6, 1)
    layout = TokenLayout((0,), 0, (), (4,))
    with pytest.raises(ValueError, match="6 tokens were given, the layout has 4"):
        LatentRing(CpuFlashKernel())(q, latent, rotated, weight(), layout, None, 1.0)
