"""Seconds of each micro-batch in each pass: its ring hop by hop, noise, copies to the host."""

from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import Float64Array, Int64Array
from megatron_hdp.planner import CostModel, Plan
from megatron_hdp.planner.bounds import block_s, speeds_of
from megatron_hdp.planner.evaluation import MemberWork, work_of
from megatron_hdp.planner.flat_plan import pieces
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.planner.validation import tokens_per_member
from megatron_hdp.simulator.execution import lanes, rings
from megatron_hdp.simulator.execution.noise import Disturbance

_FORWARD, _BACKWARD = 1 / 3, 2 / 3
"""Of compute; of K, V and their gradients that travel, likewise."""


@dataclass(frozen=True, eq=False, kw_only=True)
class MicroBatchTimes:
    """One entry a micro-batch, or a member of one; of all stages together where nothing is said."""

    forward_s: Float64Array
    """On each stage of every model chunk; shape (rows, micro-batches)."""
    backward_s: Float64Array
    """Likewise."""
    own_s: Float64Array
    """Of each member: what it does itself in both passes, waiting for others left out."""
    tokens: Int64Array
    """Of each member, padding included."""
    exposed_s: Float64Array
    """Ring traffic that the slowest member's attention does not hide, both passes."""
    copies_s: Float64Array
    """What copies to and from the host add, both passes."""
    ring_bytes: Float64Array
    """Sent by all members."""
    most_tokens: Int64Array
    """Of a micro-batch's fullest member."""


def times_of(
    plan: Plan,
    cost_model: CostModel,
    pipeline: Pipeline,
    row_layers: Int64Array,
    disturbance: Disturbance | None = None,
    step: int = 0,
) -> MicroBatchTimes:
    """What every micro-batch takes once all of its members are there.

    The planner knows the speeds of the cost model, and nothing of the disturbance; the number of
    the step counts for the noise.
    """
    disturbance = disturbance or Disturbance()
    speeds = disturbance.speeds(speeds_of(cost_model, plan.num_ranks))
    num, members = plan.num_micro_batches, len(plan.ranks)
    found = MicroBatchTimes(
        forward_s=np.empty((pipeline.rows, num)),
        backward_s=np.empty((pipeline.rows, num)),
        own_s=np.empty(members),
        tokens=np.empty(members, dtype=np.int64),
        exposed_s=np.zeros(num),
        copies_s=np.zeros(num),
        ring_bytes=np.zeros(num),
        most_tokens=np.empty(num, dtype=np.int64),
    )
    for run in pieces(plan.rank_offsets, plan.sequence_offsets, plan.local_offsets):
        work = work_of(plan, cost_model, pipeline.stages, speeds, run)
        tokens, owners = tokens_per_member(plan, run)
        factors = disturbance.factors(step, run.start + owners, plan.ranks[work.members])
        _passes(found, run, work, cost_model, pipeline, factors)
        found.tokens[work.members] = tokens
        found.most_tokens[run] = np.maximum.reduceat(tokens, work.first_members)
    _add_copies(found, plan, cost_model, pipeline, row_layers)
    return found


def most_tokens_of(plan: Plan) -> int:
    """Tokens of the fullest micro-batch on a rank, padding included."""
    runs = pieces(plan.rank_offsets, plan.sequence_offsets, plan.local_offsets)
    return max((int(tokens_per_member(plan, run)[0].max(initial=0)) for run in runs), default=0)


def _passes(
    found: MicroBatchTimes,
    run: slice,
    work: MemberWork,
    cost_model: CostModel,
    pipeline: Pipeline,
    factors: Float64Array | None,
) -> None:
    """Both passes of a run of micro-batches: three parts of compute, then the ring."""
    count, degrees = work.num_members, work.degrees
    factor = np.ones(len(work.attention_s)) if factors is None else factors
    # blocks take as long backward as forward; of local_s and fixed_s they are a part
    blocks = _blocks_s(work, cost_model, pipeline.stages)
    smooth = work.linear_s + work.local_s + work.fixed_s - blocks
    own = np.zeros(len(factor))
    passes = []
    for share in (_FORWARD, _BACKWARD):
        lead = factor * (share * smooth + blocks / 2)
        step = factor * share * work.attention_s / np.repeat(degrees, count)
        hops = np.maximum(1, count - 1)
        hop = share * work.transfer_s / hops + work.hop_s
        seconds = rings.pass_s(count, lead, step, hop)
        own += rings.own_pass_s(count, lead, step, hop)
        most = np.maximum.reduceat(step, work.first_members)
        found.exposed_s[run] += (count - 1) * np.maximum(0.0, hop - most)
        passes.append(seconds)
    weights = pipeline.row_weights
    found.forward_s[:, run], found.backward_s[:, run] = (np.outer(weights, one) for one in passes)
    found.own_s[work.members] = own
    found.ring_bytes[run] = work.ring_bytes


def _blocks_s(work: MemberWork, cost_model: CostModel, stages: int) -> Float64Array:
    """Seconds of each member's blocks, both passes: those of the ring's steps and of locals."""
    one = block_s(cost_model, stages)
    if not one:
        return np.zeros(len(work.fixed_s))
    each = np.repeat(work.degrees, work.num_members)
    speed = (cost_model.g + each * one) / work.fixed_s
    blocks: Float64Array = (each + (work.local_s > 0)) * one / speed
    return blocks


def _add_copies(
    found: MicroBatchTimes,
    plan: Plan,
    cost_model: CostModel,
    pipeline: Pipeline,
    row_layers: Int64Array,
) -> None:
    """What leaves for the host, on the member that has most of it; each row sends its share."""
    some = np.flatnonzero(plan.offload_ratios)
    if not len(some):
        return
    of_layer = plan.offload_ratios[some] * found.most_tokens[some] / row_layers.sum()
    of_layer *= cost_model.activation_bytes_per_token / cost_model.host_bytes_per_s
    leaving = lanes.leaving_of_rows(row_layers, pipeline)
    for row, (layers, leave) in enumerate(zip(row_layers, leaving, strict=True)):
        forward, backward = found.forward_s[row, some], found.backward_s[row, some]
        later = lanes.forward_s(forward, leave * of_layer, layers, leave)
        back = lanes.backward_s(backward, leave * of_layer, layers, leave)
        found.forward_s[row, some], found.backward_s[row, some] = later, back
        found.copies_s[some] += np.maximum(0.0, later + back - forward - backward)
    counts = np.diff(plan.rank_offsets)
    np.add(found.own_s, np.repeat(found.copies_s, counts), out=found.own_s)
