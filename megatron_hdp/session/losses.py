"""Losses of the caller's own, from log-probabilities or from hidden states.

A function sees the tokens with loss of one micro-batch, or of a part of it, on one rank, in no
order that it may rely on. Which tokens come together depends on the plan. So that the result does
not, a token's loss must be a function of what is given *of this token*: its row of the arrays,
nothing of its neighbours, no mean over rows. What is returned is summed over all tokens of the
global batch and divided once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Losses: TypeAlias = torch.Tensor | tuple[torch.Tensor, Mapping[str, torch.Tensor]]
TokenFunction: TypeAlias = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], Losses]
"""Of ``[n]`` log-probabilities (with entropies ``[n, 2]``) or ``[n, h]`` hidden states, and of the
batch's arrays by name, ``[n, ...]`` each on the same device: losses ``[n]``, or their sum as a
scalar. With them it may return figures by name, ``[n]`` or scalars, to be summed over the global
batch and reported."""


@dataclass(frozen=True)
class FromLogProbs:
    """A loss made of the tokens' log-probabilities, as those of policy gradients are."""

    function: TokenFunction
    """Given ``log p(token | tokens before it)``, nats, ``[n]``, float32 or (for a model in float64)
    float64. Every tensor-parallel rank of the last stage calls it and must make the same of it."""
    temperature: float | Sequence[float] = 1.0
    """What logits are divided by before the softmax, above 0; one, or one for each sequence."""
    with_entropies: bool = False
    """The function is given ``[n, 2]``: log-probabilities, and the entropies of the distributions
    they are of, nats, by the same logits. Both may be learned from."""

    @classmethod
    def weighed(
        cls, temperature: float | Sequence[float] = 1.0, *, with_entropies: bool = False
    ) -> FromLogProbs:
        """The loss that `weights_of` gives weights for.

        The batch holds them as ``arrays={"weights": weights}``, ``[length]`` of each sequence, with
        entropies ``[length, 2]``. Without either, `TokenBatch.weights` and no loss do the same.
        """
        return cls(_weighed, temperature, with_entropies)


def _weighed(found: torch.Tensor, arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
    weights = arrays.get("weights")
    if weights is None or weights.shape != found.shape:
        given = "none" if weights is None else f"[length{', 2' * (weights.dim() > 1)}]"
        raise ValueError(
            f"found the array 'weights' {given}, expected [length{', 2' * (found.dim() > 1)}] as "
            "weights_of gives them"
        )
    return -(weights.to(found.dtype) * found).sum()


@dataclass(frozen=True)
class FromHidden:
    """A loss made of hidden states: distillation, heads that predict values or rewards."""

    function: TokenFunction
    """Given the hidden states ``[n, h]`` of the tokens themselves behind the last norm, in the
    model's precision. Every tensor-parallel rank of the last stage calls it and must make the same
    of it."""
    parameters: Sequence[torch.nn.Parameter] = ()
    """Of the function's own, which begin alike on all ranks. After a step ``grad`` holds their
    gradient over the global batch, divided like the others, on the ranks of the last stage; on
    others it is None."""


@dataclass(frozen=True)
class FromValues:
    """A loss made of what a model with a head of one output says of each token, as critics' are."""

    function: TokenFunction
    """Given the values ``[n]`` of the tokens themselves, at least float32. Every tensor-parallel
    rank of the last stage calls it and must make the same of it."""

    @classmethod
    def weighed(cls) -> FromValues:
        """The loss that `weights_of` gives weights for, as ``arrays={"weights": weights}``."""
        return cls(_weighed)


Loss: TypeAlias = FromLogProbs | FromHidden | FromValues


def weights_of(
    loss: Callable[[Sequence[torch.Tensor]], torch.Tensor], log_probs: Iterable[Any]
) -> tuple[float, list[torch.Tensor]]:
    """Weights by token that train a loss over whole sequences, or over the whole batch.

    A loss of which a token's part depends on others (a ratio of whole sequences, a margin between
    two of them) cannot be had in one pass, since no rank sees all tokens. But its gradient goes
    through the log-probabilities alone, so it is that of a sum in which each token weighs
    ``- d loss / d log_prob``. `HdpSession.log_probs` gives them, at the price of one more forward.

    Args:
        loss: of the log-probabilities of each sequence, ``[length]``, with entropies
            ``[2, length]``; to a scalar.
        log_probs: as `HdpSession.log_probs` returns them.

    Returns:
        The loss, and the weights for `TokenBatch.weights`, ``[length]`` each; with entropies those
        for `FromLogProbs.weighed`, ``[length, 2]``. Step with them and ``divisor=1``: the gradient
        is the loss's, the loss that the step reports is not.

    Raises:
        ValueError: the loss is no scalar that depends on them.
    """
    given = [torch.as_tensor(one).detach().clone().requires_grad_() for one in log_probs]
    found = loss(given)
    if found.shape != () or not found.requires_grad:
        raise ValueError(
            f"the loss has shape {tuple(found.shape)} and requires_grad = {found.requires_grad}; "
            "expected a scalar made of the log-probabilities"
        )
    gradients = torch.autograd.grad(found, given, allow_unused=True)
    weights = [
        (torch.zeros_like(one) if gradient is None else -gradient).movedim(0, -1)
        for one, gradient in zip(given, gradients, strict=True)
    ]
    return float(found.detach()), weights
