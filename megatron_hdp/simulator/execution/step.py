"""One step of one plan, executed: from the first forward to the parameters of the next step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import Float64Array, Int64Array
from megatron_hdp.planner import CostModel, Plan
from megatron_hdp.planner.bounds import block_s, speeds_of
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.simulator.execution import lanes
from megatron_hdp.simulator.execution.experts import SharedExperts, own_costs
from megatron_hdp.simulator.execution.launches import Launches, by_list, launches_of
from megatron_hdp.simulator.execution.machine import Machine
from megatron_hdp.simulator.execution.memory import Kept, MemoryCosts, MemoryTrace, trace_of
from megatron_hdp.simulator.execution.noise import Disturbance
from megatron_hdp.simulator.execution.pipeline import (
    PassTimes,
    Schedule,
    parts_of_launches,
    schedule,
)
from megatron_hdp.simulator.execution.work import MicroBatchTimes, times_of


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A step's figures; seconds of its parts that stand behind each other add up to ``step_s``."""

    step_s: float
    """From its first forward to that of the next step."""
    makespan_s: float
    """Until the last rank has ended its last backward."""
    sync_s: float
    """Gradient sync behind it."""
    optimizer_s: float
    """The optimizer's own time."""
    gather_s: float
    """Parameters of the distributed optimizer."""
    loading_s: float
    """What planning and reading the next step takes longer than this one."""
    ring_exposed_s: float
    """Ring traffic that no attention hides, mean of the ranks."""
    copies_s: float
    """What copies to and from the host add, mean of the ranks."""
    waiting_s: float
    """Mean time of a rank without work of its own, until the makespan."""
    bubble_share: float
    """Share of the ranks' time in the step in which they wait for others or for data."""
    ring_bytes: float
    """Sent in rings by all ranks."""
    num_tokens: int
    """Of the global batch."""
    num_sequences: int
    """Likewise."""
    num_micro_batches: int
    """Of the plan, of all ranks together."""
    peak_memory_bytes: float | None
    """Of the fullest GPU; None: memory is not known."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StepExecution:
    """All times of a step. Arrays have an entry a micro-batch, then one of each padding."""

    plan: Plan
    pipeline: Pipeline
    """Stages of each rank."""
    padding_ranks: Int64Array
    """The rank of each padding."""
    forward_start_s: Float64Array
    """``[rows, micro-batches]``; rows are the stages of every model chunk, the first's first."""
    backward_start_s: Float64Array
    """Likewise."""
    forward_s: Float64Array
    """From its start to its last member's end, likewise."""
    backward_s: Float64Array
    """Likewise."""
    part_starts_s: tuple[Float64Array, Float64Array] | None
    """Where micro-batches run in parts: starts of all parts, forward and backward, ``[rows,
    parts]``, one micro-batch's behind another's."""
    times: MicroBatchTimes
    """The plan's own micro-batches, before stages."""
    end_s: Float64Array
    """When each rank reaches gradient sync, ``[stages, ranks]``."""
    busy_s: Float64Array
    """Own work of each rank, mean of its stages, ``[ranks]``."""
    reduced_s: Float64Array
    """When the gradients of each stage are reduced, ``[stages]``."""
    memory: MemoryTrace | None
    """Of the fullest GPU; None: memory is not known."""
    record: StepRecord

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.record.step_s

    @property
    def makespan_s(self) -> float:
        """When the last rank reaches gradient sync."""
        return self.record.makespan_s

    @property
    def forward_end_s(self) -> Float64Array:
        """``[rows, micro-batches]``."""
        return self.forward_start_s + self.forward_s

    @property
    def backward_end_s(self) -> Float64Array:
        """``[rows, micro-batches]``."""
        return self.backward_start_s + self.backward_s


def execute(
    plan: Plan,
    cost_model: CostModel,
    *,
    pipeline: Pipeline | None = None,
    row_layers: Sequence[int] = (),
    machine: Machine | None = None,
    memory: MemoryCosts | None = None,
    lockstep_ranks: int = 1,
    disturbance: Disturbance | None = None,
    step: int = 0,
) -> StepExecution:
    """Run a plan.

    Args:
        plan: with stages or lockstep it is laid out as `planner.lockstep.slots` does.
        cost_model: of one HDP rank, with the speeds that are known.
        pipeline: stages of each rank; by default one.
        row_layers: layers of each of its rows; by default those of the cost model on every stage.
        machine: what a step takes besides; by default nothing.
        memory: of a GPU; None: it is not looked at.
        lockstep_ranks: ranks beside each other that share experts.
        disturbance: what the planner does not know.
        step: number of the step, for the noise.

    Raises:
        ValueError: the plan cannot run: its ranks wait for each other for ever.
    """
    machine, pipeline = machine or Machine(), pipeline or Pipeline()
    layers = (
        np.array(row_layers)
        if row_layers
        else lanes.layers_of_rows(cost_model.num_layers, pipeline)
    )
    own = own_costs(cost_model, lockstep_ranks)
    launches = launches_of(
        plan,
        aligned=pipeline.stages > 1 or lockstep_ranks > 1,
        lockstep_ranks=lockstep_ranks,
        group_size=pipeline.group_size,
    )
    times = times_of(launches.plan, own, pipeline, layers, disturbance, step)
    passes = _with_padding(plan, launches, times, cost_model, machine, pipeline)
    speeds = (disturbance or Disturbance()).speeds(speeds_of(cost_model, plan.num_ranks))
    experts = SharedExperts.of(plan, launches, cost_model, speeds, lockstep_ranks)
    if lockstep_ranks > 1:
        passes = passes._replace(
            forward_s=experts.added(
                passes.forward_s, experts.forward_s, launches, pipeline.row_weights
            ),
            backward_s=experts.added(
                passes.backward_s, experts.backward_s, launches, pipeline.row_weights
            ),
        )
    starts = schedule(plan, launches, passes, pipeline)
    forward_s = starts.forward_end_s - starts.forward_start_s
    backward_s = starts.backward_end_s - starts.backward_start_s
    end_s, last_s = _ends(plan, launches, starts, passes.backward_s, pipeline.stages)
    # behind the last backward of one chunk come others of the rest
    overlaps = machine.overlaps_sync and pipeline.chunks == 1
    done_s = np.array(
        [
            reduced_s(
                end_s[stage],
                last_s[stage],
                overlaps,
                machine.reduction_s(stage, plan.num_ranks),
                machine.gradient_buckets,
            )
            for stage in range(pipeline.stages)
        ]
    )
    busy_s = experts.rank_s / pipeline.stages
    np.add.at(busy_s, plan.ranks, times.own_s / pipeline.stages)
    trace = None
    if memory is not None:
        trace = trace_of(
            memory,
            launches.lists,
            by_list(plan, launches, times.tokens),
            Kept.of(plan, num_padding=len(launches.padding_ranks)),
            (starts.forward_start_s, starts.backward_start_s),
            (starts.forward_end_s, starts.backward_end_s),
            pipeline,
            layers,
        )
    execution = StepExecution(
        plan=plan,
        pipeline=pipeline,
        padding_ranks=launches.padding_ranks,
        forward_start_s=starts.forward_start_s,
        backward_start_s=starts.backward_start_s,
        forward_s=forward_s,
        backward_s=backward_s,
        part_starts_s=starts.part_starts_s,
        times=times,
        end_s=end_s,
        busy_s=busy_s,
        reduced_s=done_s,
        memory=trace,
        record=_record(plan, times, machine, pipeline.stages, end_s, busy_s, done_s, trace),
    )
    for value in vars(execution).values():
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
    return execution


def reduced_s(
    end_s: Float64Array,
    last_backward_s: Float64Array,
    overlaps: bool,
    reduction_s: float,
    parts: int,
) -> float:
    """When the gradients of a stage are reduced.

    A reduction is of all ranks: a part of it begins when every rank has that part, and parts follow
    each other. Where the runtime overlaps, a rank has them one by one, evenly over its last
    backward. A rank that `planner.lockstep.end_together` does not name has all of them at its end,
    and decides nothing: it stands in a ring, or beside one, whose members go on, so that the last
    backward of one of them begins later. All parts, which are equal, take ``reduction_s``.
    """
    # ready times are linear in the part on each rank, so that only the first and last part decide
    first_s = end_s - (1 - 1 / parts) * last_backward_s if overlaps else end_s
    first, last = float(first_s.max()), float(end_s.max())
    return max(first + reduction_s, last + reduction_s / parts)


def _with_padding(
    plan: Plan,
    launches: Launches,
    times: MicroBatchTimes,
    cost_model: CostModel,
    machine: Machine,
    pipeline: Pipeline,
) -> PassTimes:
    """Of micro-batches and padding, which takes what a micro-batch takes that holds nothing."""
    speeds = speeds_of(cost_model, plan.num_ranks)[launches.padding_ranks]
    block = block_s(cost_model, pipeline.stages)
    forward_s = (cost_model.g / 3 + block / 2) / speeds
    again_s = np.where(launches.runs_twice[plan.num_micro_batches :], forward_s, 0.0)
    parts = [
        (times.forward_s, forward_s),
        (times.backward_s, (2 * cost_model.g / 3 + block / 2) / speeds + again_s),
    ]
    weights = pipeline.row_weights
    forward, backward = (
        np.concatenate([of_plan, np.outer(weights, padding)], axis=1) for of_plan, padding in parts
    )
    pieces = np.where(plan.is_stream, 1, plan.parts_of_each)  # a stream's tokens are a part's
    message = machine.message_s(times.most_tokens / pieces)
    padded = machine.message_s(np.zeros(len(launches.padding_ranks)))
    return PassTimes(forward, backward, np.concatenate([message, padded]))


def _ends(
    plan: Plan, launches: Launches, starts: Schedule, backward_s: Float64Array, stages: int
) -> tuple[Float64Array, Float64Array]:
    """When each rank ends its last backward, and how long that takes; ``[stages, ranks]``.

    It is the one through the first model chunk; in parts that of the part that runs last.
    """
    counts = launches.lists.counts
    last = launches.lists.micro_batches[np.cumsum(counts) - 1]
    parts = parts_of_launches(plan, launches)
    share = parts.shares[parts.first[launches.group_of[last]]]
    last_s = launches.longest(backward_s)[:stages, launches.group_of[last]] * share
    return starts.backward_end_s[:stages, last], last_s


def _record(
    plan: Plan,
    times: MicroBatchTimes,
    machine: Machine,
    stages: int,
    end_s: Float64Array,
    busy_s: Float64Array,
    done_s: Float64Array,
    trace: MemoryTrace | None,
) -> StepRecord:
    ranks, makespan_s = plan.num_ranks, float(end_s.max())
    sync_s = max(0.0, float(done_s.max()) - makespan_s)
    gather_s = max(machine.gather_s(stage, ranks) for stage in range(stages))
    without_loading = makespan_s + sync_s + machine.optimizer_s + gather_s
    loading_s = max(0.0, machine.loading_s - without_loading)
    step_s = without_loading + loading_s
    waiting_s = makespan_s - float(busy_s.sum()) / ranks
    counts = np.diff(plan.rank_offsets)
    return StepRecord(
        step_s=step_s,
        makespan_s=makespan_s,
        sync_s=sync_s,
        optimizer_s=machine.optimizer_s,
        gather_s=gather_s,
        loading_s=loading_s,
        ring_exposed_s=float((times.exposed_s * counts).sum()) / ranks / stages,
        copies_s=float((times.copies_s * counts).sum()) / ranks / stages,
        waiting_s=waiting_s,
        bubble_share=(waiting_s + loading_s) / step_s if step_s else 0.0,
        ring_bytes=float(times.ring_bytes.sum()),
        num_tokens=int(plan.lengths.sum()),
        num_sequences=len(plan.lengths),
        num_micro_batches=plan.num_micro_batches,
        peak_memory_bytes=None if trace is None else trace.peak_bytes,
    )
