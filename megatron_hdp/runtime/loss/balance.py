"""What a router of experts adds to the loss, sequence by sequence: the same for every plan.

Both losses are sums over real tokens. Like the cross entropy they are divided once by the global
batch's loss tokens, so a coefficient weighs a mean over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_hdp.runtime.ring import RingComm, TokenLayout


@dataclass(frozen=True, eq=False)
class RouterTokens:
    """Whose the tokens are that a rank's router sees of one micro-batch."""

    sequence_index: torch.Tensor
    """int64 ``[t]``: place among the layout's segments of each token's sequence, -1 for padding."""
    layout: TokenLayout
    comm: RingComm
    tensor_group: dist.ProcessGroup | None = None
    """Tensor-parallel ranks that see the other tokens of this HDP rank; None: there are none."""

    @property
    def is_real(self) -> torch.Tensor:
        """Bool ``[t]``: false for padding."""
        return self.sequence_index >= 0


def sequence_balance_loss(
    scores: torch.Tensor, routing_map: torch.Tensor, tokens: RouterTokens
) -> torch.Tensor:
    """This rank's part of every sequence's load-balancing loss, each times the sequence's tokens.

    The loss of a sequence of ``n`` tokens is ``E sum_e f_e P_e`` (Switch Transformer,
    arXiv 2101.03961, equation 4) over its own tokens only (DeepSeek-V2, arXiv 2405.04434,
    equations 23 to 25; Megatron's seq_aux_loss): ``f_e`` is the share of its ``n k`` choices that
    fell on expert ``e``, ``P_e`` the mean of its scores for ``e``; 1 when balanced. Times ``n``,
    the losses of a batch add up to a sum over tokens, in which token ``t`` contributes
    ``E sum_e f_e scores[t, e]``. So only ``f`` needs the tokens of other ranks; it is a count, has
    no gradient, and travels around the ring as ``E`` integers a sequence. Padding counts nowhere.

    Args:
        scores: ``[t, E]``, softmax of the router's logits over all experts.
        routing_map: bool ``[t, E]``, the experts that each token goes to.
        tokens: whose they are; every holder of a sequence must call this in the same order.

    Returns:
        Scalar, differentiable in `scores`.
    """
    rows = tokens.sequence_index.clamp(min=0)
    is_real = tokens.is_real[:, None]
    counts = routing_map.new_zeros(
        (len(tokens.layout.segments), routing_map.shape[1]), dtype=torch.int64
    )
    counts.index_add_(0, rows, (routing_map & is_real).long())
    _sum_over_holders(counts, tokens)
    shares = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
    weights = (shares.shape[1] * shares).to(scores.dtype)
    return (weights[rows] * scores * is_real).sum()


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


def _sum_over_holders(counts: torch.Tensor, tokens: RouterTokens) -> None:
    """Adds, in place, what the other holders of each sequence counted: ``[segments, E]``."""
    if tokens.tensor_group is not None:
        dist.all_reduce(counts, group=tokens.tensor_group)
    layout = tokens.layout
    on_ring = counts[: len(layout.ring_slices)]
    passing = on_ring.clone()
    for _ in range(layout.degree - 1):
        passing = tokens.comm.pass_on(passing, layout.ring, layout.index).wait()
        on_ring += passing
