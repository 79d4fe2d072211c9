"""Preference training: pairs of sequences may lie on any ranks, and their gradient is exact.

A loss of pairs goes through one number a sequence, the sum of its answer's log-probabilities. One
pass forward gives every rank all of these sums; their derivatives are weights of the tokens, by
which a step trains. So no pair has to share a rank; sequences are packed and balanced by length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from megatron_hdp.megatron import parallel
from megatron_hdp.planner import Plan
from megatron_hdp.runtime.gathering import on_every_rank
from megatron_hdp.session.batch import TokenBatch, num_sequences
from megatron_hdp.session.losses import weights_of
from megatron_hdp.session.outcome import SessionReport
from megatron_hdp.session.session import HdpSession

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


@dataclass(frozen=True, kw_only=True)
class PreferenceReport:
    """A step of preference training; the same on every rank."""

    loss: float
    """Mean over pairs, or over sequences under ``kto``."""
    rewards: torch.Tensor
    """``[sequences]``, float64: beta times what the loss is made of, in the batch's order."""
    chosen_reward: float
    """Mean over chosen (desirable) sequences; NaN where there are none."""
    rejected_reward: float
    """The same over rejected (undesirable) ones."""
    margin: float
    """`chosen_reward` less `rejected_reward`."""
    accuracy: float
    """Share of pairs whose chosen sequence has the higher reward; NaN under ``kto``."""
    kl: float
    """What ``kto`` measures against, nats, at least 0; 0 of other kinds."""
    step: SessionReport
    """Of the pass that trained. Its loss is that of the weighted tokens, which says nothing."""


def preference_step(
    session: HdpSession,
    batch: TokenBatch | Sequence[Any],
    pairs: Sequence[Any],
    objective: Preference,
    reference: Sequence[float] | None = None,
    *,
    unrelated: tuple[TokenBatch | Sequence[Any], Sequence[float]] | None = None,
    plan: Plan | None = None,
) -> PreferenceReport:
    """Leaves the exact gradient of a loss of preferences, as `HdpSession.step` does of others.

    Every rank calls it with the same arguments. It runs the batch forward for the sums, then
    forward and backward.

    Args:
        session: over the model.
        batch: sequences with their prompts; ``loss_mask`` says which tokens are the answer.
        pairs: places in the batch ``(chosen, rejected)``, each place once; under ``kto`` a bool for
            each sequence, whether it is desirable.
        objective: the loss.
        reference: sums of the answers' log-probabilities by the frozen model, nats, one for each
            sequence; with ``dpo``, ``ipo`` and ``kto``, and only these.
        unrelated: with ``kto``, answers behind prompts of others, and the reference's sums of
            them, for the batch's divergence; run forward only. Without it that is 0.
        plan: to run instead of the session's, for the same lengths.

    Raises:
        ValueError: on every rank: pairs, labels, references or a batch that cannot be run.
        DisagreementError: ranks hold different batches, references, pairs or objectives.
    """
    num = num_sequences(batch)

    def prepared() -> tuple[Any, torch.Tensor, torch.Tensor | None]:
        if isinstance(batch, TokenBatch) and batch.weights is not None:
            raise ValueError("found weights in the batch, expected none: the loss gives them")
        needs = objective.kind in _WITH_REFERENCE
        if needs != (reference is not None):
            raise ValueError(
                f"found {'no ' if needs else 'a '}reference with {objective.kind}, expected "
                f"{'one number for each sequence' if needs else 'none'}"
            )
        known = torch.zeros(num).double() if reference is None else _sums(reference, num)
        if objective.kind != "kto":
            if unrelated is not None:
                raise ValueError(f"found unrelated with {objective.kind}, expected it with kto")
            places = _places(pairs, num)
            _require_choices(batch, places)
            return places, known, None
        others = None if unrelated is None else _sums(unrelated[1], num_sequences(unrelated[0]))
        return _labels(pairs, num), known, others

    sides, known, others = on_every_rank(prepared, parallel.compute_device())
    log_probs = session.log_probs(batch, dtype=torch.float64, plan=plan)
    assert log_probs is not None  # all ranks get them
    counts = _answer_tokens(batch, log_probs)
    kl = 0.0
    if others is not None and unrelated is not None:
        of_others = session.log_probs(unrelated[0], dtype=torch.float64)
        assert of_others is not None
        kl = max(0.0, float((torch.stack([one.sum() for one in of_others]) - others).mean()))
    rewards = torch.zeros(num)

    def loss(found: Sequence[torch.Tensor]) -> torch.Tensor:
        nonlocal rewards
        sums = torch.stack([one.sum() for one in found]) - known
        if objective.kind in _BY_MEANS:
            sums = sums / counts
        rewards = objective.beta * sums.detach()
        if objective.kind == "kto":
            return objective.of_labels(sums, sides, kl).sum()
        return objective.of_pairs(sums[sides[:, 0]], sums[sides[:, 1]]).sum()

    total, weights = weights_of(loss, log_probs)
    given = batch if isinstance(batch, TokenBatch) else TokenBatch(batch)
    weighed = TokenBatch(given.tokens, given.loss_mask, weights, given.arrays, given.media)
    report = session.step(weighed, divisor=len(sides), plan=plan)
    if objective.kind == "kto":
        chosen, rejected, accuracy = rewards[sides], rewards[~sides], math.nan
    else:
        chosen, rejected = rewards[sides[:, 0]], rewards[sides[:, 1]]
        accuracy = float((chosen > rejected).double().mean())
    return PreferenceReport(
        loss=total / len(sides),
        rewards=rewards,
        chosen_reward=float(chosen.mean()),
        rejected_reward=float(rejected.mean()),
        margin=float(chosen.mean() - rejected.mean()),
        accuracy=accuracy,
        kl=kl,
        step=report,
    )


def _sums(given: Sequence[float], num: int) -> torch.Tensor:
    sums = torch.as_tensor(given, dtype=torch.float64, device="cpu").detach()
    if sums.shape != (num,):
        raise ValueError(
            f"found a reference of shape {list(sums.shape)}, expected [{num}]: the sum of the "
            "answer's log-probabilities of each sequence"
        )
    if not sums.isfinite().all():
        i = int((~sums.isfinite()).nonzero()[0])
        raise ValueError(f"found reference {sums[i]} of sequence {i}, expected a finite number")
    return sums


def _places(pairs: Sequence[Any], num: int) -> torch.Tensor:
    """Pairs ``[pairs, 2]`` that hold each sequence once."""
    seen: set[int] = set()
    for i, pair in enumerate(pairs):
        if len(pair) != 2 or any(one is None for one in pair):
            raise ValueError(f"found pair {i} {pair}, expected (chosen, rejected): both sides")
        if pair[0] == pair[1]:
            raise ValueError(f"found pair {i} of sequence {pair[0]} with itself, expected two")
        for place in map(int, pair):
            if not 0 <= place < num:
                raise ValueError(f"found sequence {place} in pair {i}, expected 0 to {num - 1}")
            if place in seen:
                raise ValueError(f"found sequence {place} in two pairs, expected it in one")
            seen.add(place)
    if len(seen) != num:
        alone = min(set(range(num)) - seen)
        raise ValueError(f"found sequence {alone} in no pair, expected each in one: leave it out")
    return torch.tensor([[int(one) for one in pair] for pair in pairs]).reshape(-1, 2)


def _require_choices(batch: TokenBatch | Sequence[Any], places: torch.Tensor) -> None:
    """Refuses a pair of one sequence with its like, which says nothing."""
    tokens = batch.tokens if isinstance(batch, TokenBatch) else batch
    for i, (chosen, rejected) in enumerate(places.tolist()):
        if np.array_equal(np.asarray(tokens[chosen]), np.asarray(tokens[rejected])):
            raise ValueError(
                f"found pair {i} of the same tokens, sequences {chosen} and {rejected}, expected "
                "two answers: leave both out"
            )


def _labels(given: Sequence[Any], num: int) -> torch.Tensor:
    """Whether each sequence is desirable, bool ``[num]``."""
    labels = np.asarray(given)
    if labels.shape != (num,) or labels.dtype != np.bool_:
        raise ValueError(
            f"found labels {labels.dtype} {list(labels.shape)}, expected one bool for each of "
            f"{num} sequences: kto has no pairs"
        )
    return torch.from_numpy(labels)


def _answer_tokens(
    batch: TokenBatch | Sequence[Any], log_probs: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Those of each sequence, ``[n]``; the same on all ranks, which hold the same batch by now."""
    masks = batch.loss_mask if isinstance(batch, TokenBatch) else None
    counts = torch.tensor(
        [len(one) - 1 for one in log_probs]
        if masks is None
        else [int(torch.as_tensor(one)[1:].sum()) for one in masks]
    )
    if not counts.all():
        i = int((counts == 0).nonzero()[0])
        raise ValueError(
            f"found no answer in sequence {i}, expected a token behind its first in loss_mask"
        )
    return counts
