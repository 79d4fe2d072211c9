"""Draws and plans steps as a whole: metadata alone, the same wherever it is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from megatron_hdp.arrays import Float64Array, Int64Array
from megatron_hdp.data.mixture import Corpus, MediaSource, Mixture, Position, Step
from megatron_hdp.data.order import SourceOrder
from megatron_hdp.data.steps.primitives import AXES, Primitives, axes_of, balanced, mixed, placed
from megatron_hdp.data.steps.settings import PlannedStep, PlanSettings
from megatron_hdp.data.steps.share import StepShares
from megatron_hdp.media import with_items_apart
from megatron_hdp.options import PLANNER_FLAGS
from megatron_hdp.planner import Plan, compute_s, make_plan, told_as
from megatron_hdp.planner.evaluation import durations_s
from megatron_hdp.planner.lockstep import planned_for


def plan_by(settings: PlanSettings, lengths: Int64Array, strategy: str | None = None) -> Plan:
    """Return the plan of sequences of these lengths, by the settings' strategy or another one.

    Raises:
        ValueError: a sequence fits on no number of ranks.
    """
    strategy = strategy or settings.strategy
    with told_as(PLANNER_FLAGS):
        return make_plan(planned_for(strategy, settings.problem(lengths)), strategy)


def items_apart(settings: PlanSettings, made: Plan, largest: Int64Array) -> Plan:
    """Return the plan; pipelines run sequences with large items in the middle of the step.

    Args:
        settings: of the run.
        made: by them.
        largest: patches of each sequence's largest item, 0 without any, ``[sequences]``.
    """
    if settings.num_stages == 1:
        return made
    times_s = durations_s(made, settings.cost_model, settings.num_stages)
    return with_items_apart(made, times_s, largest, settings.pipeline, settings.lockstep_ranks)


def shares_of(settings: PlanSettings, step: Step, plan: Plan) -> StepShares:
    """Return what cuts a step into the shares of its ranks."""
    return StepShares(
        step,
        plan,
        is_aligned=settings.is_aligned,
        lockstep_ranks=settings.lockstep_ranks,
        group_size=settings.pipeline.group_size,
    )


class StepPlanner:
    """Draws and plans the steps over one split of the data, primitive by primitive.

    Where the corpus' spec names functions of the user's own, they are called in the place of the
    built-in primitives; every method here calls the one that counts.
    """

    def __init__(self, corpus: Corpus, settings: PlanSettings) -> None:
        """Draw in the order of a run that begins now, unless `follow` says another one.

        Raises:
            PrimitiveError: a function that the spec names cannot be imported.
        """
        self.corpus = corpus
        self.settings = settings
        self.mixture = self._mixture(corpus.orders())
        self._users = Primitives.of(corpus.spec.primitives)
        self._has_items = any(isinstance(one, MediaSource) for one in corpus.sources)

    def follow(self, orders: Mapping[str, SourceOrder]) -> None:
        """Draw from now on in these orders of the sources."""
        self.mixture = self._mixture(orders)

    def mix(self, position: Position) -> Step:
        """Return the sequences of the step that begins at a position.

        Raises:
            ValueError: nothing of the step carries loss, or every source has ended.
        """
        step = self.mixture.step(position, self._weights(position))
        self._require_loss(step)
        return step

    def cost(self, lengths: Int64Array) -> Float64Array:
        """Return the seconds of whole sequences of these lengths on one rank, ``[n]``."""
        return compute_s(lengths, self.settings.cost_model)

    def settings_at(self, position: Position) -> PlanSettings:
        """Return the settings with the cost model that the step at a position is planned by."""
        costs = position.costs
        if costs is None:
            return self.settings
        base = self.settings.cost_model
        found = costs.at(position.steps).of(base, self.settings.num_ranks)
        return self.settings if found is base else replace(self.settings, cost_model=found)

    def balance(
        self,
        lengths: Int64Array,
        strategy: str | None = None,
        settings: PlanSettings | None = None,
    ) -> Plan:
        """Return the plan of sequences of these lengths.

        The run's strategy and settings count unless others are given, as of `settings_at`.

        Raises:
            ValueError: a sequence fits on no number of ranks.
        """
        settings = settings or self.settings
        if self._users.balance is not None and strategy is None:
            return balanced(self._users.balance, lengths, settings)
        return plan_by(settings, lengths, strategy)

    def distribute(self, made: Plan, position: Position) -> Plan:
        """Return a plan on the HDP ranks that run it: those that it names, if nobody says more."""
        if self._users.distribute is None:
            return made
        return placed(self._users.distribute, made, position, self.settings)

    def broadcast_at(self, *, from_plane: bool) -> frozenset[str]:
        """Return the axes, of `primitives.AXES`, along which one rank reads for the others.

        A data plane lays tokens out where all ranks can map them.
        """
        if self._users.broadcast_at is None:
            return frozenset() if from_plane else frozenset(AXES)
        return axes_of(self._users.broadcast_at, from_plane=from_plane)

    def plan(self, position: Position) -> PlannedStep:
        """Return the step that begins at a position, planned statically if the strategy fails.

        Raises:
            ValueError: nothing of the step carries loss, or every source has ended.
        """
        if self._users.plan is not None:
            return self._users.plan(self, position)
        step = self.mix(position)
        failure = None
        try:
            made = self._planned(step)
        except Exception as error:  # whatever went wrong, another plan can still train the step
            failure = f"{type(error).__name__}: {error}"
            made = self._planned(step, "static")
        return PlannedStep(step, made, failure)

    def statically(self, position: Position, failure: str) -> PlannedStep:
        """Return a step under the static plan, because the strategy's plan failed somewhere."""
        step = self.mix(position)
        return PlannedStep(step, self._planned(step, "static"), failure)

    def shares(self, planned: PlannedStep) -> StepShares:
        """Return what cuts a step into the shares of its ranks."""
        return shares_of(self.settings, planned.step, planned.plan)

    def is_over(self, position: Position) -> bool:
        """Return whether no step begins at a position, since every source has ended."""
        return self.mixture.is_over(position, self._weights(position))

    @property
    def losses_behind(self) -> int | None:
        """Steps by which the losses that a step depends on lie behind it; None: it does not."""
        spec = self.corpus.spec.primitives
        return None if spec.mix is None else spec.losses_behind

    def _weights(self, position: Position) -> tuple[float, ...] | None:
        if self._users.mix is None:
            return None
        weights = self.mixture.schedule.at(position).weights
        by_source = dict(zip(self.corpus.names, weights, strict=True))
        seen = position.losses
        losses = [] if seen is None else seen.before(position.steps)
        return mixed(self._users.mix, by_source, position, losses)

    def _planned(self, step: Step, strategy: str | None = None) -> Plan:
        settings = self.settings_at(step.before)
        made = self.balance(step.lengths, strategy, settings)
        if settings.num_stages > 1 and self._has_items and self._users.balance is None:
            made = items_apart(settings, made, self._largest_items(step))
        made = self.distribute(made, step.before)
        made.validate(num_layers=self.settings.cost_model.num_layers)
        return made

    def _largest_items(self, step: Step) -> Int64Array:
        """Patches of each sequence's largest item, 0 without any."""
        found = np.zeros(len(step), dtype=np.int64)
        columns = step.sources.tolist(), step.rows.tolist(), step.lengths.tolist()
        for i, (number, row, length) in enumerate(zip(*columns, strict=True)):
            if isinstance(source := self.corpus.sources[number], MediaSource):
                items = source.items(row, length)
                found[i] = max((item.num_patches for _, item in items), default=0)
        return found

    def _mixture(self, orders: Mapping[str, SourceOrder]) -> Mixture:
        return self.corpus.mixture(orders, self.settings.batch, self.settings.seed)

    def _require_loss(self, step: Step) -> None:
        if step.num_loss_tokens.any():
            return
        if not len(step):
            raise ValueError("every source of the data has ended: no step is left")
        names = [self.corpus.names[i] for i in sorted(set(step.sources.tolist()))]
        raise ValueError(
            f"found no token with loss in the {len(step):,} sequences of step "
            f"{step.before.steps + 1}, expected at least one: they are of {', '.join(names)}, and "
            "a sequence of one token predicts nothing, a conversation only its trained turns. Look "
            "at these sources, or make the global batch larger"
        )
