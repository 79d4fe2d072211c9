"""A sink: one more score in every query's softmax, beside those of its keys, without a value.

It is added once all blocks are known. Given output and log-sum-exp with it, backward of the blocks
is right as it is: weights and row sums come from these two.
"""

from __future__ import annotations

import torch


def with_sink(
    out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[t, heads, d]`` and log-sum-exp ``[t, heads]`` with the sink ``[heads]``."""
    if sink is None:
        return out, lse
    total = torch.logaddexp(lse, sink.to(lse.dtype))
    return (out * (lse - total).exp()[..., None]).to(out.dtype), total


def gradient_of_sink(
    sink: torch.Tensor | None, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> torch.Tensor | None:
    """Minus its weight times the row sum of every token, given `out` and `lse` with it.

    Padding adds nothing: its `dout` is zero.
    """
    if sink is None:
        return None
    weight = (sink.to(lse.dtype) - lse).exp()
    row_sum = (dout.to(lse.dtype) * out).sum(-1)
    return -(weight * row_sum).sum(0).to(sink.dtype)
