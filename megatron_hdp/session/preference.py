"""Preference training: pairs of sequences may lie on any ranks, and their gradient is exact.

A loss of pairs goes through one number a sequence, the sum of its answer's log-probabilities. One
pass forward gives every rank all of these sums; their derivatives are weights of the tokens, by
which a step trains. So no pair has to share a rank; sequences are packed and balanced by length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_hdp.megatron import parallel
from megatron_hdp.planner import Plan
from megatron_hdp.runtime.gathering import on_every_rank
from megatron_hdp.runtime.loss import Preference, RewardFigures
from megatron_hdp.session.batch import TokenBatch, num_sequences
from megatron_hdp.session.losses import weights_of
from megatron_hdp.session.outcome import SessionReport
from megatron_hdp.session.session import HdpSession


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
        needs = objective.needs_reference
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
        losses, rewards = objective.losses(sums, counts, sides, kl)
        return losses.sum()

    total, weights = weights_of(loss, log_probs)
    given = TokenBatch.of(batch)
    weighed = TokenBatch(given.tokens, given.loss_mask, weights, given.arrays, given.media)
    report = session.step(weighed, divisor=len(sides), plan=plan)
    figures = RewardFigures.of(rewards, sides)
    return PreferenceReport(
        loss=total / len(sides),
        rewards=rewards,
        chosen_reward=figures.chosen,
        rejected_reward=figures.rejected,
        margin=figures.margin,
        accuracy=figures.accuracy,
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
