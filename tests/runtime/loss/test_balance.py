"""The router's losses add up to their definition over whole sequences, wherever the tokens lie."""

from collections import Counter
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_hdp.runtime.loss.balance import (
    RoutedCounts,
    RouterTokens,
    count_routed,
    sequence_balance_loss,
    z_loss,
)
from megatron_hdp.runtime.ring.comm import RingComm
from megatron_hdp.runtime.ring.layout import TokenLayout
from tests.support.host_waits import counted

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
        counts=RoutedCounts(3, 2),
        router="one",
    )
    scores, noted = logits.softmax(-1).requires_grad_(), []
    with mock.patch(*fault) if fault else nullcontext():
        count_routed(chosen, tokens)
        loss, z = sequence_balance_loss(scores, tokens, noted.append), z_loss(logits, tokens)
        loss.backward()
    (loss,) = noted
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


class CountingComm(RingComm):
    """Notes the elements of each message, and to whom it goes."""

    def __init__(self, group):
        super().__init__(group)
        self.messages = []

    def exchange(self, sent, following, received, previous):
        self.messages.append((sent.numel(), following, previous))
        return super().exchange(sent, following, received, previous)


def layers_on_a_ring(ring, num_layers, is_recomputed):
    """Body of a rank: messages of a micro-batch of `num_layers`, and gradients by their scores.

    Every member holds two tokens of one sequence; in layer `l` member `r` sends both to expert
    `(l + r) % EXPERTS`.
    """
    index = ring.index(dist.get_rank())
    layout = TokenLayout(ring=ring, index=index, ring_slices=(2,), local_lengths=())
    comm, counts, losses, leaves = CountingComm(dist.group.WORLD), RoutedCounts(1, 1), [], []
    for passes in range(1 + is_recomputed):
        for layer in range(num_layers):
            tokens = RouterTokens(torch.zeros(2).long(), layout, comm, counts=counts, router=layer)
            chosen = torch.arange(EXPERTS) == (layer + index) % EXPERTS
            count_routed(chosen.expand(2, -1), tokens)
            if passes == is_recomputed:
                leaves.append(torch.ones(2, EXPERTS, dtype=torch.float64, requires_grad=True))
                losses.append(sequence_balance_loss(leaves[-1], tokens, lambda loss: None))
    assert not comm.messages
    for loss in losses[::-1]:
        loss.backward()
    return comm.messages, [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_all_layers_share_one_way_around_the_ring(run_ranks, is_recomputed):
    ring, num_layers = (2, 0, 1), 4
    found = run_ranks(3, layers_on_a_ring, ring, num_layers, is_recomputed)
    for rank, (messages, gradients) in enumerate(found):
        at = ring.index(rank)
        neighbours = ring[(at + 1) % 3], ring[at - 1]
        assert messages == [(num_layers * EXPERTS, *neighbours)] * 2
        for layer, gradient in enumerate(gradients):
            chosen = [(layer + member) % EXPERTS for member in range(3)]
            expected = [EXPERTS / 3 * (expert in chosen) for expert in range(EXPERTS)]
            torch.testing.assert_close(gradient, torch.tensor([expected] * 2).double())


def nothing(*args):
    return None


@pytest.mark.parametrize(
    "padding, fault",
    [(0, ()), (-1, ("megatron_hdp.runtime.loss.balance._sum_over_ring", nothing))],
    ids=["padding-counted", "ring-not-summed"],
)
def test_the_comparison_can_fail(run_ranks, padding, fault):
    assert largest_error(run_ranks(2, ring_losses, (0, 1), padding, *fault)) > 1e-3


def test_padding_alone_is_no_loss():
    layout = TokenLayout(ring=(0,), index=0, ring_slices=(), local_lengths=(1,))
    nobody = RingComm(dist.GroupMember.NON_GROUP_MEMBER)
    tokens = RouterTokens(
        torch.tensor([-1]), layout, nobody, counts=RoutedCounts(0, 0), router="one"
    )
    scores, noted = torch.full((1, EXPERTS), 1 / EXPERTS, requires_grad=True), []
    count_routed(torch.arange(EXPERTS)[None] < TOPK, tokens)
    sequence_balance_loss(scores, tokens, noted.append).backward()
    assert noted == [0] and not scores.grad.any()
    assert z_loss(scores.detach(), tokens) == 0


def test_counts_are_exact_in_32_bits_and_wait_for_nothing():
    layout = TokenLayout(ring=(0,), index=0, ring_slices=(), local_lengths=(40, 9, 15))
    generator = torch.Generator().manual_seed(0)
    index = torch.arange(3).repeat_interleave(torch.tensor([40, 9, 15]))
    index[torch.rand(64, generator=generator) < 0.2] = -1  # rounding a sequence up pads inside
    chosen, counts = torch.rand(64, EXPERTS, generator=generator) < 0.4, RoutedCounts(3, 0)
    found = Counter()
    nobody = RingComm(dist.GroupMember.NON_GROUP_MEMBER)
    tokens = RouterTokens(index, layout, nobody, counts=counts, router="one")
    with counted(found):
        count_routed(chosen, tokens)
    expected = torch.stack([chosen[index == place].sum(0) for place in range(3)])
    sums = counts.of_all_holders(tokens)
    assert torch.equal(sums, expected.int()) and sums.dtype == torch.int32 and not found
