"""Learns from each step what it cost: one small exchange, the same result on every rank.

A rank gives what it ran, in the terms of the cost model, and what its forwards and backwards took
without the waits for ring members inside them. So a slow member of a ring stands out by itself:
those that wait for it have the same compute as ever. On a GPU the times are those of the events
that the step's report reads anyway, when the device is past the step.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from megatron_hdp.arrays import Float64Array
from megatron_hdp.data.mixture import Position
from megatron_hdp.data.spec import PrimitivesSpec
from megatron_hdp.data.steps import RankStep, work_of
from megatron_hdp.megatron.execution import RankOutcome
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.parallel import RankPlace, compute_device, say
from megatron_hdp.megatron.step.figures import StepReport
from megatron_hdp.planner import CostModel
from megatron_hdp.planner.online import COLUMNS, FilterState, Finding, SeenCosts, observe
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.runtime.gathering import gathered
from megatron_hdp.runtime.host_to_device import numbers_to_device
from megatron_hdp.strategies import follows_speeds

BEHIND, BEHIND_WITH_PLANE = 2, 4
"""Steps between a step and the latest one that its plan may depend on: as few as allow one step to
be planned ahead, or the two that a data plane makes ahead unless told otherwise."""

Table: TypeAlias = Float64Array


class Learning:
    """What one run learns of its costs; every rank of the job makes the same calls.

    It holds nothing of the run: what is known is part of the position.

    Raises:
        ValueError: what the run does cannot be learnt from, or would not follow what is learnt.
    """

    def __init__(
        self,
        arguments: TrainingArguments,
        place: RankPlace,
        cost_model: CostModel,
        primitives: PrimitivesSpec,
        pipeline: Pipeline,
        *,
        has_plane: bool,
    ) -> None:
        _require_alone(place)
        _require_followed(primitives)
        self._place = place
        # of the whole model, for each second of this stage; a stage that computes nothing says 0
        self._of_all = float(pipeline.stages)
        if pipeline.weights:
            share = float(pipeline.stage_weights[place.stage])
            self._of_all = 1 / share if share else 0.0
        self._base = cost_model
        self._begun = FilterState.begin(cost_model, place.num_hdp_ranks)
        self._behind = BEHIND_WITH_PLANE if has_plane else BEHIND
        self._moves = follows_speeds(arguments.hdp_strategy) and primitives.balance is None
        self._strategy = arguments.hdp_strategy
        everyone = gathered((place.hdp_rank, socket.gethostname()))
        self._hdp_ranks = np.array([rank for rank, _ in everyone])
        self._hosts = [host for _, host in everyone]

    def following(self, position: Position) -> Position:
        """The position with what is known there, for a step that may be the first one here."""
        costs = position.costs or self._nothing()
        state = costs.filter
        assert state is not None
        if not state.began_as(self._begun):
            costs = self._carried_over(position, state)
        return replace(position, costs=replace(costs, behind=self._behind, steps=position.steps))

    def moved(self, position: Position, places: Sequence[int | None]) -> Position:
        """The position when ranks have others' numbers: what was learnt of each stays its own.

        Args:
            position: of the steps before.
            places: of each HDP rank, which one it was; None: it is new.
        """
        costs = position.costs
        if costs is None or costs.filter is None or costs.filter.base != self._begun.base:
            return position
        kept = costs.filter.among(places, self._begun)
        return replace(position, costs=self._begun_with(position, kept))

    def _begun_with(self, position: Position, kept: FilterState) -> SeenCosts:
        old = position.steps - self._behind  # so that the next step follows it
        return replace(
            SeenCosts(self._behind), changes=((old, kept.corrections),), num_changes=1, filter=kept
        )

    def _nothing(self) -> SeenCosts:
        return SeenCosts(self._behind, filter=self._begun)

    def _carried_over(self, position: Position, state: FilterState) -> SeenCosts:
        """What another number of ranks, or another cost model to begin with, leaves of it."""
        num_ranks = self._place.num_hdp_ranks
        if state.base != self._begun.base:
            say(
                "what the run has learnt of its costs is dropped: it began with another cost model "
                "(--hdp-cost-model, or the model's shape)"
            )
            return self._nothing()
        instead = f"of {state.num_ranks} HDP ranks, this run has {num_ranks}"
        if state.num_ranks == num_ranks:
            instead = "--hdp-rank-speeds says others than the run began with"
        say(
            "what the run has learnt of its costs: coefficients are kept, speeds of ranks are "
            f"dropped ({instead})"
        )
        return self._begun_with(position, state.on(self._begun))

    def observed(self, position: Position, step: RankStep, outcome: RankOutcome) -> SeenCosts:
        """What is known after the step that began at a position from `following`."""
        costs = position.costs
        assert costs is not None and costs.filter is not None
        table = exchanged(self._observation(step, outcome))
        before = costs.filter
        state, findings = observe(before, self._by_hdp_rank(table))
        found = costs.with_step(position.steps, state, state.corrections)
        for one in findings:
            self._say_found(one, table, position.steps)
        if (state.coefficients != before.coefficients).any():
            attention, linear, g = state.coefficients.tolist()
            say(
                f"cost model corrected after step {position.steps + 1}, as of step "
                f"{self._from_step(position.steps)}: attention x {attention:.3g}, linear work x "
                f"{linear:.3g}, {g * 1e3:.3g} ms a micro-batch"
            )
        return found

    def reported(self, report: StepReport, costs: SeenCosts) -> StepReport:
        """The report of a step, and what is known after it."""
        state = costs.filter
        assert state is not None
        return replace(
            report,
            position_after=replace(report.position_after, costs=costs),
            slow_ranks=int((state.speeds < 1).sum()),
            slowest_rank_speed=float(state.speeds.min()),
            cost_model_changes=costs.num_changes,
            cost_model_error=state.error,
        )

    def _observation(self, step: RankStep, outcome: RankOutcome) -> list[float]:
        work = work_of(step.share, self._base, self._place.num_stages)
        return [*work.tolist(), outcome.compute_s * self._of_all]

    def _by_hdp_rank(self, table: Table) -> Table:
        """Of each HDP rank its slowest GPU: all of them wait for that one."""
        found = np.zeros((self._place.num_hdp_ranks, len(COLUMNS)))
        np.maximum.at(found, self._hdp_ranks, table)
        return found

    def _from_step(self, step: int) -> int:
        """Number, from 1, of the first step that follows what was found behind a step, from 0."""
        return step + self._behind + 1

    def _say_found(self, one: Finding, table: Table, step: int) -> None:
        ranks = np.flatnonzero(self._hdp_ranks == one.rank)
        slowest = int(ranks[np.argmax(table[ranks, -1])])
        who = f"rank {slowest} (host {self._hosts[slowest]}, HDP rank {one.rank})"
        when = f"since step {step + 2 - one.steps}"
        what = f"its work follows as of step {self._from_step(step)}"
        if not self._moves:
            what = f"its work stays as it is, --hdp-strategy {self._strategy} knows no speeds"
        say(f"{who} runs at speed {one.now:.2g}, {one.before:.2g} before, {when}: {what}")


def speeds_at(position: Position | None) -> list[float]:
    """What a run has learnt of the speeds of its HDP ranks by a position; empty: nothing."""
    costs = None if position is None else position.costs
    return [] if costs is None or costs.filter is None else costs.filter.speeds.tolist()


def exchanged(mine: list[float]) -> Table:
    """What every rank of the job gives, in the order of ranks; shape (ranks, values)."""
    device = compute_device()
    row = numbers_to_device(mine, torch.float64, device)
    table = torch.empty(dist.get_world_size() * len(mine), dtype=torch.float64, device=device)
    dist.all_gather_into_tensor(table, row)
    found: Table = table.cpu().numpy().reshape(-1, len(mine))
    return found


def _require_alone(place: RankPlace) -> None:
    if place.lockstep_ranks > 1:
        raise ValueError(
            f"learning costs while training: found experts across {place.lockstep_ranks} HDP "
            "ranks, expected them inside one: waiting for other ranks' experts cannot be told from "
            "compute. Leave out --hdp-online, or keep --expert-model-parallel-size within "
            "--tensor-model-parallel-size"
        )


def _require_followed(primitives: PrimitivesSpec) -> None:
    for name, value in (("plan", primitives.plan), ("distribute", primitives.distribute)):
        if value is not None:
            raise ValueError(
                f"learning costs while training: found primitives: {name}: {value}, expected the "
                "built-in one, which follows what is learnt of ranks: leave out --hdp-online, or "
                f"'{name}' in the file of --hdp-data"
            )
