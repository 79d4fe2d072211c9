"""The router's losses add up to their definition over whole sequences, wherever the tokens lie."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_hdp.runtime.loss.balance import RouterTokens, sequence_balance_loss, z_loss
from megatron_hdp.runtime.ring.comm import RingComm
from megatron_hdp.runtime.ring.layout import TokenLayout

EXPERTS, TOPK = 5, 2
LENGTHS = [11, 7, 4]  # the first two are shared by a ring, the last one is whole


def routed(length, seed):
    """Logits, scores and choice of a whole sequence."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(length, EXPERTS, generator=generator, dtype=torch.float64)
    chosen = torch.zeros(length, EXPERTS, dtype=torch.bool)
    chosen.scatter_(1, logits.topk(TOPK).indices, True)
    return logits, chosen


def definition(length, seed):
    """Tokens x E sum_e f_e P_e, and its gradient by the scores."""
    logits, chosen = routed(length, seed)
    scores = logits.softmax(-1).requires_grad_()
    shares = chosen.double().mean(0) / TOPK
    loss = length * EXPERTS * (shares * scores.mean(0)).sum()
    loss.backward()
    return loss.item(), scores.grad


def token(place, position):
    """Logits and choice of one token; padding would all go to the first experts."""
    if position < LENGTHS[place]:
        logits, chosen = routed(LENGTHS[place], place)
        return logits[position : position + 1], chosen[position : position + 1]
    return torch.full((1, EXPERTS), 9.0).double(), torch.arange(EXPERTS)[None] < TOPK


def ring_losses(ring, padding=-1, *fault):
    """Body of a rank: its parts of both losses, and the gradient of every token it holds."""
    degree, index = len(ring), ring.index(dist.get_rank())
    chunks = [-(-length // (2 * degree)) for length in LENGTHS[:2]]
    held = [
        (place, position)
        for place, chunk in enumerate(chunks)
        for j in (index, 2 * degree - 1 - index)
        for position in range(j * chunk, (j + 1) * chunk)
    ]
    whole = LENGTHS[2] + 1 if index == 0 else 0
    held += [(2, position) for position in range(whole)]
    logits, chosen = map(torch.cat, zip(*(token(*where) for where in held), strict=True))
    tokens = RouterTokens(
        torch.tensor([place if at < LENGTHS[place] else padding for place, at in held]),
        TokenLayout(
            ring=ring,
            index=index,
            ring_slices=tuple(2 * chunk for chunk in chunks),
            local_lengths=(whole,) if whole else (),
        ),
        RingComm(dist.group.WORLD),
    )
    scores = logits.softmax(-1).requires_grad_()
    with mock.patch(*fault) if fault else nullcontext():
        loss, z = sequence_balance_loss(scores, chosen, tokens), z_loss(logits, tokens)
    loss.backward()
    return loss.item(), z.item(), list(zip(held, scores.grad, strict=True))


def largest_error(parts):
    """Of the summed losses and of every token's gradient."""
    expected = [definition(length, seed) for seed, length in enumerate(LENGTHS)]
    z = sum(routed(n, s)[0].logsumexp(-1).square().sum().item() for s, n in enumerate(LENGTHS))
    errors = [abs(sum(part[0] for part in parts) - sum(loss for loss, _ in expected))]
    errors.append(abs(sum(part[1] for part in parts) - z))
    for (place, position), grad in (row for part in parts for row in part[2]):
        real = position < LENGTHS[place]
        errors.append((grad - (expected[place][1][position] if real else 0)).abs().max().item())
    assert sum(len(part[2]) for part in parts) >= sum(LENGTHS)
    return max(errors)


@pytest.mark.parametrize("ring", [(1, 0), (2, 0, 1)])
def test_a_ring_adds_up_to_whole_sequences(run_ranks, ring):
    assert largest_error(run_ranks(len(ring), ring_losses, ring)) < 1e-13


def nothing(*args):
    return None


@pytest.mark.parametrize(
    "padding, fault",
    [(0, ()), (-1, ("megatron_hdp.runtime.loss.balance._sum_over_holders", nothing))],
    ids=["padding-counted", "ring-not-summed"],
)
def test_the_comparison_can_fail(run_ranks, padding, fault):
    assert largest_error(run_ranks(2, ring_losses, (0, 1), padding, *fault)) > 1e-3


def test_padding_alone_is_no_loss():
    layout = TokenLayout(ring=(0,), index=0, ring_slices=(), local_lengths=(1,))
    tokens = RouterTokens(torch.tensor([-1]), layout, RingComm(dist.GroupMember.NON_GROUP_MEMBER))
    scores = torch.full((1, EXPERTS), 1 / EXPERTS, requires_grad=True)
    loss = sequence_balance_loss(scores, torch.arange(EXPERTS)[None] < TOPK, tokens)
    loss.backward()
    assert loss == 0 and not scores.grad.any()
    assert z_loss(scores.detach(), tokens) == 0
