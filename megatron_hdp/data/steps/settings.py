"""What decides how steps are drawn and planned, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.mixture import BatchSize, Step
from megatron_hdp.planner import CostModel, Evaluation, Plan, Problem
from megatron_hdp.planner.experts import evaluation_of
from megatron_hdp.planner.pipeline import Pipeline


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
    num_model_chunks: int = 1
    """Parts of the model on each pipeline stage (virtual stages)."""
    stage_weights: tuple[float, ...] = ()
    """Relative time of every virtual stage in the model's order; empty: all alike."""
    sequence_parts: int = 1
    """In which a micro-batch may run."""
    streams: bool = False
    """Whether sequences may run as streams."""
    recompute: str = "off"
    """Whether sequences may be recomputed in backward: auto or off."""
    host_memory_bytes: float | None = None
    """That a micro-batch may fill, of an HDP rank; None: no limit."""
    window: int | None = None
    """Tokens that a query sees in layers with a window, for a step's sums; no plan asks for it."""

    @property
    def pipeline(self) -> Pipeline:
        """That each HDP rank is."""
        return Pipeline(self.num_stages, self.num_model_chunks, self.stage_weights)

    def times_of(self, made: Plan) -> Evaluation:
        """When each rank runs what of a plan, as the cost model expects."""
        return evaluation_of(made, self.cost_model, self.lockstep_ranks, self.pipeline)

    def problem(self, lengths: Int64Array) -> Problem:
        """What the planner is asked for sequences of these lengths.

        Raises:
            ValueError: the planner takes no such settings.
        """
        return Problem(
            lengths=lengths,
            ranks=self.num_ranks,
            tokens_per_rank=self.tokens_per_rank,
            max_length=self.max_length,
            slice_multiple=self.slice_multiple,
            cost_model=self.cost_model,
            pipeline=self.pipeline,
            expert_parallel_size=self.lockstep_ranks,
            sequence_parts=self.sequence_parts,
            streams=self.streams,
            recompute=self.recompute,
            offload=self.offload,
            host_memory_bytes=self.host_memory_bytes,
        )

    @property
    def is_aligned(self) -> bool:
        """Whether a micro-batch must have the same slot in the lists of all its ranks."""
        return self.num_stages > 1 or self.lockstep_ranks > 1


@dataclass(frozen=True)
class PlannedStep:
    """A step and its plan."""

    step: Step
    plan: Plan
    failure: str | None = None
    """Why the plan is the static one instead of the strategy's."""
