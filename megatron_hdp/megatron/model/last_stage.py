"""What a loss of the caller's own may take from the end of the model, for one micro-batch.

It is given in the packed-sequence parameters (`HdpPackedSeqParams.loss_head`), and called where the
model would make logits. Tokens are chosen before anything is made of them, so prompts, padding and
masked tokens cost no logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from megatron_hdp.runtime.loss import LossSums, linear_cross_entropy, linear_log_probs


@dataclass(frozen=True)
class LastStage:
    """The last stage's hidden states of a micro-batch, and its output weights.

    One loss takes one of its methods, once. Rows are places among the micro-batch's tokens on this
    rank, int64 ``[n]``; tensor-parallel ranks give the same.
    """

    states: torch.Tensor
    """``[s, 1, h]`` behind the last norm; with sequence parallelism this rank's run of them."""
    group: dist.ProcessGroup
    """The ranks that share the vocabulary."""
    is_shared_out: bool
    """Whether tensor-parallel ranks share the tokens (sequence parallelism)."""
    take_weight: Callable[[], tuple[torch.Tensor, torch.Tensor | None]]
    """Output weights ``[V / TP, h]`` as a fused loss takes them, and their buffer of gradients."""

    def hidden(self, rows: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[n, h]``, for a loss equal on all tensor-parallel ranks."""
        states = self.states
        if self.is_shared_out:
            states = gather_from_sequence_parallel_region(
                states, tensor_parallel_output_grad=False, group=self.group
            )
        chosen: torch.Tensor = _WithoutGradient.apply(
            states.flatten(0, 1).index_select(0, rows), self.take_weight()[0]
        )
        return chosen

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        """What a head of one output makes of the rows, ``[n]``, at least float32."""
        found = torch.nn.functional.linear(self.states, self.take_weight()[0])
        if self.is_shared_out:
            found = gather_from_sequence_parallel_region(
                found, tensor_parallel_output_grad=False, group=self.group
            )
        found = found.to(torch.promote_types(found.dtype, torch.float32))
        return found.flatten().index_select(0, rows)

    def log_probs(
        self,
        rows: torch.Tensor,
        labels: torch.Tensor,
        temperature: float | torch.Tensor = 1.0,
        with_entropies: bool = False,
    ) -> torch.Tensor:
        """Log-probabilities ``[n]`` of token ids ``[n]``, ``[2, n]`` with entropies.

        See `linear_log_probs`. Logits are divided by the temperature, or by each row's, ``[n]``.
        """
        hidden = self._for_vocabulary(rows)
        if isinstance(temperature, torch.Tensor):
            hidden = hidden / temperature.to(hidden.dtype)[:, None]
        elif temperature != 1.0:
            hidden = hidden / temperature
        weight, main_grad = self.take_weight()
        sharers = self._sharers()
        return linear_log_probs(
            hidden, weight, labels, sharers, main_grad=main_grad, with_entropies=with_entropies
        )

    def weighted_nll(
        self,
        rows: torch.Tensor | None,
        labels: torch.Tensor,
        weights: torch.Tensor,
        sums: LossSums | None = None,
    ) -> torch.Tensor:
        """Sum of negative log-probabilities of labels ``[n]``, each times its weight ``[n]``.

        Of all tokens where `rows` is None. Losses are added up by group in `sums`, too.
        """
        hidden = self._for_vocabulary(rows)
        weight, main_grad = self.take_weight()
        return linear_cross_entropy(
            hidden, weight, labels, weights, self._sharers(), sums=sums, main_grad=main_grad
        )

    def _for_vocabulary(self, rows: torch.Tensor | None) -> torch.Tensor:
        """Hidden states whose gradients backward sums over the ranks that share the vocabulary."""
        if self.is_shared_out:  # and hands each its run
            states = gather_from_sequence_parallel_region(self.states, group=self.group)
        else:
            states = copy_to_tensor_model_parallel_region(self.states, group=self.group)
        hidden: torch.Tensor = states.flatten(0, 1)
        return hidden if rows is None else hidden.index_select(0, rows)

    def _sharers(self) -> dist.ProcessGroup | None:
        return self.group if self.group.size() > 1 else None


class _WithoutGradient(torch.autograd.Function):
    """Passes hidden states on; the output weights, which are not used, get a gradient of 0.

    Megatron's DDP waits for a gradient of every parameter.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.like = weight.detach()
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        zeros = ctx.like.new_zeros(()).expand_as(ctx.like) if ctx.needs_input_grad[1] else None
        return grad, zeros
