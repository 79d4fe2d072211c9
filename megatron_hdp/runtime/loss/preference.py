"""Losses of preferences: of one number a sequence, the sum of its answer's log-probabilities."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, get_args

import torch
from torch.nn.functional import logsigmoid

Kind: TypeAlias = Literal["dpo", "ipo", "orpo", "simpo", "kto"]
_WITH_REFERENCE = ("dpo", "ipo", "kto")
_BY_MEANS = ("ipo", "orpo", "simpo")


@dataclass(frozen=True, kw_only=True)
class Preference:
    """A loss of preferences: the mean over pairs, or under ``kto`` over sequences.

    Below, ``c`` and ``r`` are the chosen and the rejected answer's sum of log-probabilities, nats,
    less the reference's where there is one; under ``ipo``, ``orpo`` and ``simpo`` they are divided
    by the answer's tokens.

    Raises:
        ValueError: an unknown kind, or numbers out of range.
    """

    kind: Kind
    """``dpo``: ``-log sigmoid(beta (c - r))``. ``ipo``: ``(c - r - 1 / (2 beta))^2``. ``simpo``:
    ``-log sigmoid(beta (c - r) - gamma)``. ``orpo``: ``-c - beta log sigmoid(odds(c) - odds(r))``
    with ``odds(x) = x - log(1 - e^x)``. ``kto``: ``1 - sigmoid(beta (s - kl))`` of a desirable
    sequence, ``1 - sigmoid(beta (kl - s))`` of another."""
    beta: float = 0.1
    """Above 0."""
    label_smoothing: float = 0.0
    """Share of labels that are wrong, from 0 to below 0.5; of ``dpo`` and ``simpo``."""
    gamma: float = 0.5
    """Margin that ``simpo`` asks for."""
    desirable_weight: float = 1.0
    """What ``kto`` multiplies losses of desirable sequences by, at least 0."""
    undesirable_weight: float = 1.0
    """The same of others."""

    def __post_init__(self) -> None:
        """Checks."""
        if self.kind not in get_args(Kind):
            raise ValueError(f"found kind {self.kind!r}, expected one of {get_args(Kind)}")
        for one in fields(self)[1:]:
            value = getattr(self, one.name)
            most = 0.5 if one.name == "label_smoothing" else math.inf
            if not 0 <= value < most or (one.name == "beta" and value == 0):
                least = "above 0" if one.name == "beta" else "from 0"
                raise ValueError(f"found {one.name} {value}, expected it {least} to below {most}")
        if self.label_smoothing and self.kind not in ("dpo", "simpo"):
            raise ValueError(f"found label_smoothing with {self.kind}, expected dpo or simpo")

    def of_pairs(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Losses ``[pairs]`` of ``c`` and ``r``, ``[pairs]`` each; not of ``kto``."""
        delta = chosen - rejected
        if self.kind == "ipo":
            return (delta - 1 / (2 * self.beta)).square()
        if self.kind == "orpo":
            odds = delta - torch.log1p(-chosen.exp()) + torch.log1p(-rejected.exp())
            return -chosen - self.beta * logsigmoid(odds)
        logits = self.beta * delta - (self.gamma if self.kind == "simpo" else 0.0)
        wrong = self.label_smoothing
        return -(1 - wrong) * logsigmoid(logits) - wrong * logsigmoid(-logits)

    def of_labels(self, sums: torch.Tensor, is_desirable: torch.Tensor, kl: float) -> torch.Tensor:
        """Losses ``[n]`` of ``kto``, of sums less the reference's ``[n]``, bool labels ``[n]``."""
        good = is_desirable.to(sums.dtype)  # nothing in float32
        weight = self.desirable_weight * good + self.undesirable_weight * (1 - good)
        return weight * torch.sigmoid(self.beta * (1 - 2 * good) * (sums - kl))

    @property
    def needs_reference(self) -> bool:
        """Whether it measures against a frozen model."""
        return self.kind in _WITH_REFERENCE

    def losses(
        self, sums: torch.Tensor, counts: torch.Tensor, sides: torch.Tensor, kl: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses of all pairs, and what the sequences are worth.

        Args:
            sums: of the answers' log-probabilities ``[n]``, less the reference's where it needs
                one.
            counts: of the answers' tokens ``[n]``.
            sides: places of (chosen, rejected) ``[pairs, 2]``; under ``kto`` bool ``[n]``.
            kl: under ``kto``, what is measured against.

        Returns:
            Losses ``[pairs]``, under ``kto`` ``[n]``, and rewards ``[n]`` without a gradient.
        """
        if self.kind in _BY_MEANS:
            sums = sums / counts
        rewards = self.beta * sums.detach()
        if self.kind == "kto":
            return self.of_labels(sums, sides, kl), rewards
        return self.of_pairs(sums[sides[:, 0]], sums[sides[:, 1]]), rewards


@dataclass(frozen=True)
class RewardFigures:
    """Rewards over a batch."""

    chosen: float
    """Mean over chosen (desirable) sequences; NaN where there are none."""
    rejected: float
    """The same over rejected (undesirable) ones."""
    accuracy: float
    """Share of pairs whose chosen sequence has the higher reward; NaN under ``kto``."""

    @classmethod
    def of(cls, rewards: torch.Tensor, sides: torch.Tensor) -> RewardFigures:
        """Those of rewards ``[n]``, by sides as of `Preference.losses`."""
        if sides.dtype == torch.bool:
            return cls(float(rewards[sides].mean()), float(rewards[~sides].mean()), math.nan)
        chosen, rejected = rewards[sides[:, 0]], rewards[sides[:, 1]]
        accuracy = float((chosen > rejected).double().mean())
        return cls(float(chosen.mean()), float(rejected.mean()), accuracy)

    @property
    def margin(self) -> float:
        """`chosen` less `rejected`."""
        return self.chosen - self.rejected
