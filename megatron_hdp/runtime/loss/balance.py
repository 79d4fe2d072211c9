"""What a router of experts adds to the loss, sequence by sequence: the same for every plan.

Both losses are sums over real tokens. Like the cross entropy they are divided once by the global
batch's loss tokens, so a coefficient weighs a mean over tokens.

What the holders of a sequence count is summed around their ring. Only gradients need the sums, so
all layers of a stage are summed at once, when backward comes to the first of them: ``D - 1``
messages between neighbours a micro-batch, instead of as many a layer. Then all of its parts have
been counted, too. Fewer messages still, to members at distances 1, 2, 4 .., would open connections
that rings do not have otherwise.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_hdp.runtime.ring import RingComm, TokenLayout

_LEAST_SUM = 1e-20  # Megatron's, against a division by 0


@dataclass(frozen=True, eq=False)
class RouterTokens:
    """Whose the tokens are that a rank's router sees of one micro-batch."""

    sequence_index: torch.Tensor
    """int64 ``[t]``: place among the micro-batch's sequences of each token's, -1 for padding."""
    layout: TokenLayout
    comm: RingComm
    tensor_group: dist.ProcessGroup | None = None
    """Tensor-parallel ranks that see the other tokens of this HDP rank; None: there are none."""
    counts: RoutedCounts = field(kw_only=True)
    """Of the micro-batch, on this stage."""
    router: object = field(kw_only=True)
    """Which one sees them."""

    @property
    def is_real(self) -> torch.Tensor:
        """Bool ``[t]``: false for padding."""
        return self.sequence_index >= 0

    @property
    def rows(self) -> torch.Tensor:
        """int64 ``[t]``: like `sequence_index`, but of padding any one."""
        return self.sequence_index.clamp(min=0)


class RoutedCounts:
    """How many tokens of each sequence the routers of a stage sent to each expert.

    One object a micro-batch, also where it runs in parts. On all holders of a sequence its routers
    must count in one order.

    Args:
        num_sequences: of the micro-batch on this rank.
        num_on_ring: the first ones of them, which are sharded over the ring.
    """

    def __init__(self, num_sequences: int, num_on_ring: int) -> None:
        self.num_sequences = max(1, num_sequences)  # there is a row to ask for, also of padding
        self.num_on_ring = num_on_ring
        self._counts: defaultdict[object, dict[TokenLayout, torch.Tensor]] = defaultdict(dict)
        self._sums: dict[object, torch.Tensor] | None = None
        self._has_met = False

    def note(self, tokens: RouterTokens, counts: torch.Tensor) -> None:
        """Notes what a router counted of some tokens, int32 ``[sequences, E]``.

        Recomputation notes it again.
        """
        if self._sums is None:
            self._counts[tokens.router][tokens.layout] = counts

    def of_all_holders(self, tokens: RouterTokens) -> torch.Tensor:
        """What all holders counted with a router, ``[sequences, E]``.

        The first call exchanges the counts of all routers, when all parts have run forward; its
        tensor-parallel ranks must make it together. So must a ring that of the first part which
        holds tokens of it: behind it a rank may run padding, of which the others know nothing.
        """
        if self._sums is None:
            of_parts = [list(one.values()) for one in self._counts.values()]
            counts = torch.stack([functools.reduce(torch.add, one) for one in of_parts])
            if tokens.tensor_group is not None:
                dist.all_reduce(counts, group=tokens.tensor_group)
            self._sums = dict(zip(self._counts, counts, strict=True))
        if tokens.layout.ring_slices and not self._has_met:
            counts = torch.stack(list(self._sums.values()))
            _sum_over_ring(counts[:, : self.num_on_ring], tokens)
            self._sums = dict(zip(self._sums, counts, strict=True))
            self._has_met = True
        return self._sums[tokens.router]


def count_routed(routing_map: torch.Tensor, tokens: RouterTokens) -> None:
    """Notes where a router sends a micro-batch's real tokens, bool ``[t, E]``.

    To be called in every forward of a layer, also in one without gradients that is recomputed.
    """
    num_rows = tokens.counts.num_sequences + 1  # the last one of padding, whose index is -1
    counts = routing_map.new_zeros((num_rows, routing_map.shape[1]), dtype=torch.int32)
    counts.index_add_(0, tokens.sequence_index % num_rows, routing_map.int())
    tokens.counts.note(tokens, counts[:-1])


def balancing_scores(logits: torch.Tensor, score_function: str) -> torch.Tensor:
    """Scores ``[t, E]`` that the balancing loss levels; each token's add up to 1.

    Args:
        logits: ``[t, E]``, the router's.
        score_function: ``softmax``, or ``sigmoid`` (DeepSeek-V3, arXiv 2412.19437, equation 19).
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if score_function == "softmax":
        return torch.softmax(logits, dim=-1, dtype=dtype)
    scores = torch.sigmoid(logits.to(dtype))
    return scores / (scores.sum(dim=-1, keepdim=True) + _LEAST_SUM)


def sequence_balance_loss(
    scores: torch.Tensor, tokens: RouterTokens, note: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """This rank's part of every sequence's load-balancing loss, each times the sequence's tokens.

    The loss of a sequence of ``n`` tokens is ``E sum_e f_e P_e`` (Switch Transformer,
    arXiv 2101.03961, equation 4) over its own tokens only (DeepSeek-V2, arXiv 2405.04434,
    equations 23 to 25; Megatron's seq_aux_loss): ``f_e`` is the share of its ``n k`` choices that
    fell on expert ``e``, ``P_e`` the mean of its scores for ``e``; 1 when balanced. Times ``n``,
    the losses of a batch add up to a sum over tokens, in which token ``t`` contributes
    ``E sum_e f_e scores[t, e]``. So only ``f`` needs the tokens of other ranks; it is a count, has
    no gradient, and travels around the ring as ``E`` integers a sequence and layer. Padding counts
    nowhere.

    Args:
        scores: ``[t, E]``, `balancing_scores` of the router's logits over all experts.
        tokens: whose they are; `count_routed` must have been called with them.
        note: gets the loss, a scalar, in backward.

    Returns:
        Scalar with the loss's gradient by `scores`, and 0 as a number: in forward nobody knows it.
        Every holder of a sequence must run backward through it in the same order.
    """
    loss: torch.Tensor = _BalanceLoss.apply(scores, tokens, note)
    return loss


class _BalanceLoss(torch.autograd.Function):
    """See `sequence_balance_loss`."""

    @staticmethod
    def forward(
        ctx: Any, scores: torch.Tensor, tokens: RouterTokens, note: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        ctx.save_for_backward(scores)
        ctx.tokens, ctx.note = tokens, note
        return scores.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (scores,) = ctx.saved_tensors
        tokens: RouterTokens = ctx.tokens
        counts = tokens.counts.of_all_holders(tokens)
        shares = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
        weights = (shares.shape[1] * shares).to(scores.dtype)[tokens.rows]
        weights *= tokens.is_real[:, None]
        ctx.note((weights * scores).sum())
        return weights.mul_(grad), None, None


def z_loss(logits: torch.Tensor, tokens: RouterTokens) -> torch.Tensor:
    """Sum over real tokens of ``logsumexp(logits)^2`` (ST-MoE, arXiv 2202.08906, equation 5).

    Args:
        logits: ``[t, E]``.
        tokens: whose they are.

    Returns:
        Scalar, float32 or (for float64 logits) float64.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (logits.logsumexp(-1).square() * tokens.is_real).sum()


def _sum_over_ring(counts: torch.Tensor, tokens: RouterTokens) -> None:
    """Adds, in place, what the other members of the ring counted: ``[.., sequences, E]``."""
    layout = tokens.layout
    passing = counts.clone(memory_format=torch.contiguous_format)
    for _ in range(layout.degree - 1):
        passing = tokens.comm.pass_on(passing, layout.ring, layout.index).wait()
        counts += passing
