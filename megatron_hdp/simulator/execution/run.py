"""Several steps of several strategies, and how much faster each is than the static mesh."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megatron_hdp.arrays import Int64Array
from megatron_hdp.planner import CostModel, Plan, Problem, make_plan, told_as
from megatron_hdp.planner.bounds import speeds_of
from megatron_hdp.planner.lockstep import planned_for
from megatron_hdp.planner.memory import Job
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.simulator.execution.machine import Machine
from megatron_hdp.simulator.execution.memory import MemoryCosts
from megatron_hdp.simulator.execution.noise import Disturbance
from megatron_hdp.simulator.execution.step import StepExecution, StepRecord, execute
from megatron_hdp.simulator.execution.work import most_tokens_of
from megatron_hdp.strategies import BASELINE

REPORT_KEYS = {
    "step_time_s": "Seconds of a step, the median.",
    "tokens_per_s": "Of all GPUs together, the median.",
    "bubble_share": "Share of all ranks' time in a step in which they wait, the median.",
    "ring_bytes": "What all ranks send in rings in a step, the median.",
    "mfu": "Share of the GPUs' peak FLOP that the model's are, the median.",
    "peak_memory_bytes": "Of the fullest GPU in any step.",
    "speedup": "Step time of static over this one; null where static has no plan.",
    "planned_by": 'The strategy that planned, where "auto" was asked for.',
    "reason": "Why there is no plan; all else is null then. Else null.",
    "steps": "A record of each step.",
}
"""What `Run.figures` gives, by name."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all strategies share: the ranks, what they cost, and what they are like."""

    ranks: int
    """HDP ranks."""
    tokens_per_rank: int
    cost_model: CostModel
    """Of one HDP rank, with the speeds that the planner knows."""
    num_gpus: int = 1
    pipeline: Pipeline = field(default_factory=Pipeline)
    """Stages of each HDP rank."""
    lockstep_ranks: int = 1
    max_length: int | None = None
    slice_multiple: int = 1
    sequence_parts: int = 1
    streams: bool = False
    recompute: str = "off"
    offload: str = "off"
    host_memory_bytes: float | None = None
    machine: Machine = field(default_factory=Machine)
    job: Job | None = None
    """For memory and MFU; None: neither is known."""
    flops_of: Callable[[Int64Array], float] | None = None
    """The model's FLOP of sequences of such lengths, forward and backward."""
    disturbance: Disturbance = field(default_factory=Disturbance)
    flags: Mapping[str, str] = field(default_factory=dict)
    """What the planner's refusals call its arguments: see `planner.told_as`."""

    @property
    def aligned(self) -> bool:
        """Whether a micro-batch stands at one position in the lists of all its ranks."""
        return self.pipeline.stages > 1 or self.lockstep_ranks > 1

    def problem(self, lengths: Int64Array) -> Problem:
        """A global batch to plan."""
        return Problem(
            lengths=lengths,
            ranks=self.ranks,
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

    def planned(self, lengths: Int64Array, strategy: str) -> Plan:
        """Plan a global batch as training does (`data.steps.planning`).

        Raises:
            ValueError: this strategy has no plan for it.
        """
        with told_as(self.flags):
            made = make_plan(planned_for(strategy, self.problem(lengths)), strategy)
        made.validate(num_layers=self.cost_model.num_layers)
        return made

    def executed(self, made: Plan, step: int = 0) -> StepExecution:
        """Run a plan; `step` is its number, for the noise."""
        memory: MemoryCosts | None = None
        row_layers: tuple[int, ...] = ()
        if self.job is not None:
            memory = MemoryCosts.of_job(self.job, most_tokens_of(made))
            row_layers = self.job.split.layers
        return execute(
            made,
            self.cost_model,
            pipeline=self.pipeline,
            row_layers=row_layers,
            machine=self.machine,
            memory=memory,
            lockstep_ranks=self.lockstep_ranks,
            disturbance=self.disturbance,
            step=step,
        )

    def mfu(self, lengths: Int64Array, step_s: float) -> float | None:
        """The model's FLOP of a batch, as a share of what the GPUs could do in that time."""
        if self.flops_of is None:
            return None
        peak = self.num_gpus * step_s * self.machine.peak_flops_per_s
        return self.flops_of(lengths) / peak


@dataclass(frozen=True, eq=False, kw_only=True)
class Outcome:
    """The steps of one strategy, or the reason why there are none."""

    strategy: str
    """As it was asked for."""
    planned_by: str | None = None
    """What it came to: "auto" is dp-balance, pp-balance or ep-balance."""
    steps: tuple[StepRecord, ...] = ()
    mfu: float | None = None
    """Median of the steps, as are the others."""
    first: StepExecution | None = None
    """The first step with all its times."""
    reason: str | None = None
    """Why there is no plan."""

    @property
    def step_time_s(self) -> float | None:
        """Seconds of a step."""
        return _median(one.step_s for one in self.steps)

    @property
    def tokens_per_s(self) -> float | None:
        """Of all GPUs together."""
        return _median(one.num_tokens / one.step_s for one in self.steps)

    @property
    def bubble_share(self) -> float | None:
        """See `StepRecord`."""
        return _median(one.bubble_share for one in self.steps)

    @property
    def ring_bytes(self) -> float | None:
        """Sent in rings in a step, by all ranks."""
        return _median(one.ring_bytes for one in self.steps)

    @property
    def peak_memory_bytes(self) -> float | None:
        """Of the fullest GPU in any step."""
        peaks = [one.peak_memory_bytes for one in self.steps if one.peak_memory_bytes is not None]
        return max(peaks, default=None)

    def speedup_over(self, other: "Outcome | None") -> float | None:
        """How many times as fast its steps are."""
        mine, theirs = self.step_time_s, other.step_time_s if other is not None else None
        return theirs / mine if mine and theirs else None


def _median(values: Iterable[float | None]) -> float | None:
    """Of those that are known; None if none is."""
    known = [value for value in values if value is not None]
    return float(statistics.median(known)) if known else None


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """What `simulate` found."""

    setting: Setting
    seed: int
    outcomes: Mapping[str, Outcome]
    """By the strategies' names, in their order; the static mesh is always among them."""

    def speedup(self, strategy: str) -> float | None:
        """How many times as fast as the static mesh; None where one of the two has no plan."""
        return self.outcomes[strategy].speedup_over(self.outcomes.get(BASELINE))

    def figures(self, strategy: str) -> dict[str, Any]:
        """A strategy's figures by the names of report.json."""
        outcome = self.outcomes[strategy]
        steps = [vars(one) for one in outcome.steps]
        others = {"speedup": self.speedup(strategy), "steps": steps}
        return {key: others[key] if key in others else getattr(outcome, key) for key in REPORT_KEYS}


def simulate(
    setting: Setting,
    batches: Sequence[Int64Array],
    strategies: Iterable[str],
    seed: int = 0,
    done: Callable[[], object] = lambda: None,
) -> Run:
    """Run every batch, the lengths of a step, by every strategy and by the static mesh.

    ``done`` is called after each step of each strategy; ``seed`` is noted.

    Raises:
        ValueError: speeds that are not those of the ranks. A strategy without a plan raises
            nothing, it has a reason.
    """
    setting.disturbance.speeds(speeds_of(setting.cost_model, setting.ranks))
    names = dict.fromkeys([BASELINE, *strategies])
    outcomes = {name: outcome_of(setting, batches, name, done) for name in names}
    return Run(setting=setting, seed=seed, outcomes=MappingProxyType(outcomes))


def outcome_of(
    setting: Setting,
    batches: Sequence[Int64Array],
    strategy: str,
    done: Callable[[], object] = lambda: None,
) -> Outcome:
    """Every batch by one strategy; where it has no plan for one of them, the reason."""
    records, shares, first, planned_by = [], [], None, None
    for step, lengths in enumerate(batches):
        try:
            made = setting.planned(lengths, strategy)
            execution = setting.executed(made, step)
        except ValueError as error:
            return Outcome(strategy=strategy, reason=f"step {step + 1}: {error}")
        planned_by = made.strategy
        first = first or execution
        records.append(execution.record)
        shares.append(setting.mfu(lengths, execution.step_s))
        done()
    return Outcome(
        strategy=strategy,
        planned_by=planned_by,
        steps=tuple(records),
        mfu=_median(shares),
        first=first,
    )
