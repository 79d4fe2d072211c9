"""Draws and plans steps as a whole: metadata alone, the same wherever it is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_hdp.data.index_file import Int64Array
from megatron_hdp.data.mixture import BatchSize, Corpus, Mixture, Position, Step
from megatron_hdp.data.order import SourceOrder
from megatron_hdp.data.steps.share import StepShares
from megatron_hdp.options import PLANNER_FLAGS
from megatron_hdp.planner import CostModel, Plan, plan, told_as
from megatron_hdp.planner.lockstep import stages_for, strategy_for


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What decides, beside the data, how steps are drawn and planned."""

    batch: BatchSize
    seed: int
    num_ranks: int
    """HDP ranks."""
    num_stages: int
    """Pipeline stages."""
    lockstep_ranks: int
    """Consecutive HDP ranks that enter each other's communication in every layer."""
    tokens_per_rank: int
    strategy: str
    max_length: int
    """``--seq-length``."""
    slice_multiple: int
    offload: str
    cost_model: CostModel

    @property
    def is_aligned(self) -> bool:
        """Whether a micro-batch must stand at one position in the lists of all its ranks."""
        return self.num_stages > 1 or self.lockstep_ranks > 1


@dataclass(frozen=True)
class PlannedStep:
    """A step and its plan."""

    step: Step
    plan: Plan
    failure: str | None = None
    """Why the plan is the static one instead of the strategy's."""

    def shares(self, settings: PlanSettings) -> StepShares:
        """Return what cuts it into the shares of ranks."""
        return StepShares(
            self.step,
            self.plan,
            is_aligned=settings.is_aligned,
            lockstep_ranks=settings.lockstep_ranks,
        )


class StepPlanner:
    """Draws and plans the steps over one split of the data."""

    def __init__(self, corpus: Corpus, settings: PlanSettings) -> None:
        """Draw in the order of a run that begins now, unless `follow` says another one."""
        self.corpus = corpus
        self.settings = settings
        self.mixture = self._mixture(corpus.orders())

    def follow(self, orders: Mapping[str, SourceOrder]) -> None:
        """Draw from now on in these orders of the sources."""
        self.mixture = self._mixture(orders)

    def step(self, position: Position) -> PlannedStep:
        """Return the step that begins at a position, planned statically if the strategy fails.

        Raises:
            ValueError: nothing of the step carries loss, or every source has ended.
        """
        step = self.mixture.step(position)
        self._require_loss(step)
        failure = None
        try:
            made = self.plan(step.lengths)
            self._validate(made)
        except Exception as error:  # whatever went wrong, another plan can still train the step
            failure = f"{type(error).__name__}: {error}"
            made = self.plan(step.lengths, strategy="static")
            self._validate(made)
        return PlannedStep(step, made, failure)

    def statically(self, step: Step, failure: str) -> PlannedStep:
        """Return a step under the static plan, because the strategy's plan failed somewhere."""
        made = self.plan(step.lengths, strategy="static")
        self._validate(made)
        return PlannedStep(step, made, failure)

    def plan(self, lengths: Int64Array, strategy: str | None = None) -> Plan:
        """Return the plan of sequences of these lengths, by the run's strategy if none is given.

        Raises:
            ValueError: a sequence fits on no number of ranks.
        """
        settings = self.settings
        strategy = strategy_for(strategy or settings.strategy, aligned=settings.is_aligned)
        with told_as(PLANNER_FLAGS):
            return plan(
                lengths,
                ranks=settings.num_ranks,
                tokens_per_rank=settings.tokens_per_rank,
                strategy=strategy,
                max_length=settings.max_length,
                slice_multiple=settings.slice_multiple,
                cost_model=settings.cost_model,
                ranks_per_node=settings.cost_model.ranks_per_node,
                pipeline_stages=stages_for(strategy, settings.num_stages),
                offload=settings.offload,
            )

    def _mixture(self, orders: Mapping[str, SourceOrder]) -> Mixture:
        return self.corpus.mixture(orders, self.settings.batch, self.settings.seed)

    def _validate(self, made: Plan) -> None:
        made.validate(num_layers=self.settings.cost_model.num_layers)

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
