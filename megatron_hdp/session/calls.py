"""What a session's calls are given besides a batch: compared between ranks, and refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch

from megatron_hdp.data.steps import PlanSettings
from megatron_hdp.megatron.model import head_gives_values
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.planner import CostModel, Plan
from megatron_hdp.runtime.gathering import EveryRankError
from megatron_hdp.runtime.health import fingerprint, require_agreement
from megatron_hdp.session.batch import CheckedBatch
from megatron_hdp.session.losses import FromHidden, FromLogProbs, FromValues
from megatron_hdp.session.objectives import name_of


def kind_of(loss: Any) -> tuple[object, ...]:
    """What ranks compare of a loss of the caller's own."""
    if loss is None:
        return ()
    function = getattr(loss, "function", loss)
    how = (getattr(loss, name, None) for name in ("temperature", "with_entropies"))
    return type(loss).__name__, name_of(function), *how


def require_loss(loss: object, divisor: object, num_sequences: int) -> None:
    """Refuses a loss or a divisor that is none."""
    if not isinstance(loss, FromLogProbs | FromHidden | FromValues | None):
        raise ValueError(
            f"found the loss {type(loss).__name__}, expected FromLogProbs, FromHidden or "
            "FromValues of a function, or None"
        )
    if isinstance(loss, FromLogProbs):
        _require_temperature(loss.temperature, num_sequences)
    if divisor is not None:
        _require_above_0("divisor", divisor)


def require_result(temperature: object, dtype: object, to: object, num_sequences: int) -> None:
    """Refuses what no log-probabilities can be returned by."""
    _require_temperature(temperature, num_sequences)
    if to not in ("all", "first"):
        raise ValueError(f"found to={to!r}, expected 'all' or 'first'")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"found dtype={dtype}, expected torch.float32 or torch.float64")


def require_head(chunks: Sequence[Any], wants_values: bool) -> None:
    """Refuses, on ranks of the last stage, what the model's head does not give."""
    for chunk in chunks:
        if head_gives_values(chunk) is (not wants_values):
            found, other = ("log-probabilities", "values")[:: -1 if wants_values else 1]
            raise ValueError(
                f"found a call for {found} of a model whose head gives {other}: take "
                f"{'log_probs or FromLogProbs' if wants_values else 'values or FromValues'}"
            )


def require_plan(plan: Plan, settings: PlanSettings, cost_model: CostModel, num_ranks: int) -> None:
    """Refuses a plan that these ranks cannot run."""
    if plan.num_ranks != num_ranks or plan.slice_multiple != settings.slice_multiple:
        raise ValueError(
            f"found a plan for {plan.num_ranks} ranks and slices of multiples of "
            f"{plan.slice_multiple}, expected {num_ranks} and {settings.slice_multiple}: "
            "let session.plan make it"
        )
    plan.validate(num_layers=cost_model.num_layers)


def require_same(
    call: tuple[object, ...], batch: CheckedBatch, plan: Plan, device: torch.device
) -> None:
    """Compares what ranks are about to do; every rank must call this.

    Raises:
        DisagreementError: they hold different batches, plans or arguments.
    """
    facts = {
        "what is called": fingerprint(call),
        "number of sequences": len(batch.lengths),
        "names and types of the arrays": fingerprint(batch.names()),
        "plan": plan.fingerprint(),
    }
    require_agreement(facts, device)
    require_agreement(batch.fingerprints(), device)


def divisor_of(given: float | None, loss_tokens: int) -> float:
    """The divisor of a step: by default its tokens with loss, of which there must be one."""
    if not loss_tokens:
        raise EveryRankError(
            "found no token with loss in the batch, expected at least one: a sequence's first "
            "token is predicted by nothing, and loss_mask may take out the others"
        )
    return float(loss_tokens if given is None else given)


def _require_temperature(given: object, num_sequences: int) -> None:
    """One number, or one for each sequence."""
    if not isinstance(given, Sequence):
        _require_above_0("temperature", given)
        return
    if len(given) != num_sequences:
        raise ValueError(
            f"found {len(given):,} temperatures, expected one for each of the {num_sequences:,} "
            "sequences, or a single number for all"
        )
    for one in given:
        _require_above_0("temperature", one)


def _require_above_0(name: str, given: Any) -> None:
    is_number = isinstance(given, Real) and not isinstance(given, bool)
    if not (is_number and math.isfinite(given) and given > 0):
        raise ValueError(f"found {name} {given!r}, expected a finite number above 0")


def require_known(arguments: TrainingArguments) -> None:
    """Refuses what a session does not know."""
    if not arguments.hybrid_data_parallel:
        raise ValueError("found no --hybrid-data-parallel, which a session runs by: add it")
    if not arguments.hdp_fused_loss:
        raise ValueError(
            "found --no-hdp-fused-loss: a session's losses begin at the model's hidden states, "
            "without its logits: leave it out"
        )
    if arguments.hdp_survive:
        raise ValueError(
            "found --hdp-survive, which is for the standalone trainer: leave it out; the loop of a "
            "session calls leave and enter itself"
        )
    if arguments.hdp_objective is not None:
        raise ValueError(
            f"found --hdp-objective {arguments.hdp_objective}, which is for the standalone "
            "trainer: leave it out; the loop of a session calls preference_step"
        )
    if arguments.hdp_encoder is not None:
        raise ValueError(
            f"found --hdp-encoder {arguments.hdp_encoder}, which is for the standalone trainer: "
            "leave it out; the loop of a session calls attach_encoder"
        )
    if arguments.hidden_dropout:
        raise ValueError(
            f"found --hidden-dropout {arguments.hidden_dropout}, expected 0: a session's gradients "
            "do not depend on the plan, and what dropout draws would"
        )
