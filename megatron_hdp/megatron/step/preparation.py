"""What one rank needs before a step: its global batch, the plan, and its own part of the data.

Nothing here communicates, so the next step can be prepared in the background. Every rank draws and
plans the same; each reads only what it must.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_hdp.data import SourceOrder
from megatron_hdp.data.index_file import Int64Array
from megatron_hdp.data.mixture import (
    BatchSize,
    Corpus,
    Mixture,
    Position,
    RankMicroBatch,
    Step,
    padding_micro_batch,
    read_micro_batch,
)
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.parallel import RankPlace
from megatron_hdp.options import PLANNER_FLAGS
from megatron_hdp.planner import CostModel, Plan, plan, told_as
from megatron_hdp.planner.lockstep import PADDING, slots, strategy_for


@dataclass(frozen=True)
class PreparedStep:
    """A global batch and its plan, alike on every rank, and this rank's micro-batches."""

    step: Step
    plan: Plan
    micro_batches: tuple[RankMicroBatch, ...]
    """This rank's, padding included, in the order in which they run."""
    seconds: float
    """How long planning and reading took."""
    failure: str | None = None
    """Why the plan is the static one instead of the strategy's."""


class StepPreparation:
    """Prepares the steps over one split of the data."""

    def __init__(
        self,
        arguments: TrainingArguments,
        place: RankPlace,
        cost_model: CostModel,
        corpus: Corpus,
        vocab_size: int,
    ) -> None:
        self.arguments = arguments
        self.place = place
        self.cost_model = cost_model
        self.corpus = corpus
        self.vocab_size = vocab_size
        self.mixture = self._mixture(corpus.orders())

    def follow(self, orders: Mapping[str, SourceOrder]) -> None:
        """Draws from now on in these orders of the sources; call it while nothing is prepared."""
        self.mixture = self._mixture(orders)

    def _mixture(self, orders: Mapping[str, SourceOrder]) -> Mixture:
        arguments = self.arguments
        batch = BatchSize(arguments.global_batch_size, arguments.hdp_global_batch_tokens)
        return self.corpus.mixture(orders, batch, arguments.seed)

    def prepare(self, position: Position) -> PreparedStep:
        """The step that begins at a position; planned statically where the strategy fails.

        Raises:
            ValueError: nothing of the step carries loss, or every source has ended.
        """
        started = time.perf_counter()
        step = self.mixture.step(position)
        self._require_loss(step)
        failure = None
        try:
            step_plan = self.plan(step.lengths)
            self._validate(step_plan)
        except Exception as error:  # whatever went wrong, another plan can still train the step
            failure = f"{type(error).__name__}: {error}"
            step_plan = self.plan(step.lengths, strategy="static")
            self._validate(step_plan)
        return self._read(step, step_plan, failure, started)

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

    def prepare_statically(self, prepared: PreparedStep, failure: str) -> PreparedStep:
        """The same step under the static plan, because the strategy's plan failed somewhere."""
        started = time.perf_counter()
        step_plan = self.plan(prepared.plan.lengths, strategy="static")
        again = self._read(prepared.step, step_plan, failure, started)
        return replace(again, seconds=again.seconds + prepared.seconds)

    def plan(self, lengths: Int64Array, strategy: str | None = None) -> Plan:
        """The plan for sequences of these lengths, by the run's strategy unless another is given.

        Raises:
            ValueError: a sequence fits on no number of ranks.
        """
        arguments = self.arguments
        strategy = strategy_for(
            strategy or arguments.hdp_strategy, aligned=self.place.needs_alignment
        )
        with told_as(PLANNER_FLAGS):
            return plan(
                lengths,
                ranks=self.place.num_hdp_ranks,
                tokens_per_rank=arguments.hdp_tokens_per_rank,
                strategy=strategy,
                max_length=arguments.seq_length,
                slice_multiple=arguments.hdp_slice_multiple,
                cost_model=self.cost_model,
                ranks_per_node=self.cost_model.ranks_per_node,
                pipeline_stages=self.place.num_stages,
                offload=arguments.hdp_offload,
            )

    def _validate(self, step_plan: Plan) -> None:
        step_plan.validate(num_layers=self.cost_model.num_layers)

    def _read(
        self, step: Step, step_plan: Plan, failure: str | None, started: float
    ) -> PreparedStep:
        mine = slots(
            step_plan,
            aligned=self.place.needs_alignment,
            lockstep_ranks=self.place.lockstep_ranks,
        )[self.place.hdp_rank]
        micro_batches = tuple(self._read_slot(m, step, step_plan) for m in mine.tolist())
        return PreparedStep(
            step=step,
            plan=step_plan,
            micro_batches=micro_batches,
            seconds=time.perf_counter() - started,
            failure=failure,
        )

    def _read_slot(self, m: int, step: Step, step_plan: Plan) -> RankMicroBatch:
        if m == PADDING:
            return padding_micro_batch(self.place.hdp_rank, self.place.token_multiple)
        return read_micro_batch(
            step_plan,
            m,
            self.place.hdp_rank,
            step,
            self.corpus,
            vocab_size=self.vocab_size,
            reads_tokens=self.place.reads_tokens,
            token_multiple=self.place.token_multiple,
        )
