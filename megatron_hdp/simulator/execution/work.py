"""Seconds of each micro-batch in each pass: its ring hop by hop, noise, copies to the host."""

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from megatron_hdp.arrays import BoolArray, Float64Array, Int64Array
from megatron_hdp.planner import CostModel, Plan
from megatron_hdp.planner.bounds import block_s, speeds_of
from megatron_hdp.planner.flat_plan import pieces
from megatron_hdp.planner.member_work import MemberWork, work_of
from megatron_hdp.planner.parts import shares_of_parts, sizes_of_parts
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


class _Turns(NamedTuple):
    """Turns of the rings of a run of micro-batches: one each, in parts one a part."""

    micro_batch: Int64Array
    """From the run's first on."""
    num_parts: Int64Array
    """Of its micro-batch."""
    sent: Float64Array
    """What goes around, as a share of the whole's keys."""
    seen: Float64Array
    """Its share of the micro-batch's attention."""
    member: Int64Array
    """Entries of the members of all turns, one turn behind the other, in those of the run."""

    @classmethod
    def of(cls, plan: Plan, run: slice, work: MemberWork, cost_model: CostModel) -> Self:
        """Cut what runs in parts."""
        parts = plan.parts_of_each[run]
        shares = np.ones((2, int(parts.sum())))
        begins = np.cumsum(parts) - parts
        for m in np.flatnonzero(parts > 1).tolist():
            mine = slice(begins[m], begins[m] + parts[m])
            sizes = sizes_of_parts(plan, run.start + m)
            if work.num_members[m] > 1 and sum(size.tokens for size in sizes):
                shares[:, mine] = shares_of_parts(sizes, cost_model.query_ratio)
            else:
                shares[:, mine] = 1 / parts[m]
        micro_batch = np.repeat(np.arange(len(parts)), parts)
        count = work.num_members[micro_batch]
        skipped = work.first_members[micro_batch] - (np.cumsum(count) - count)
        member = np.arange(int(count.sum())) + np.repeat(skipped, count)
        return cls(micro_batch, parts[micro_batch], shares[0], shares[1], member)


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
        turns = _Turns.of(plan, run, work, cost_model)
        blocks_s = _blocks_s(plan, run, work, cost_model, pipeline.stages, speeds)
        recomputed = plan.is_recomputed[run]
        _passes(found, run, work, turns, blocks_s, pipeline, factors, recomputed)
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
    turns: _Turns,
    blocks_s: Float64Array,
    pipeline: Pipeline,
    factors: Float64Array | None,
    recomputed: BoolArray,
) -> None:
    """Both passes of a run of micro-batches: three parts of compute, then the ring's turns.

    Backward of what is recomputed begins with one more forward.
    """
    of, members, count = turns.micro_batch, turns.member, work.num_members[turns.micro_batch]
    factor = np.ones(len(work.attention_s)) if factors is None else factors
    # blocks take as long backward as forward; of local_s and fixed_s they are a part
    smooth = work.linear_s + work.local_s + work.fixed_s - blocks_s
    own = np.zeros(len(factor))
    passes = []
    twice = recomputed[of]
    for share, times in ((_FORWARD, 1 + twice), (_BACKWARD, np.ones(len(of)))):
        lead = (factor * (share * smooth + blocks_s / 2))[members]
        lead = lead / np.repeat(turns.num_parts, count)
        attention = (factor * share * work.attention_s)[members]
        step = attention * np.repeat(turns.seen / count, count)
        hops = np.maximum(1, count - 1)
        hop = share * work.transfer_s[of] * turns.sent / hops + work.hop_s[of]
        seconds = np.zeros(len(work.num_members))
        np.add.at(seconds, of, rings.pass_s(count, lead, step, hop))
        own_s = rings.own_pass_s(count, lead, step, hop)
        np.add.at(own, members, own_s * np.repeat(times, count))
        most = np.maximum.reduceat(step, np.cumsum(count) - count)
        home = work.home_s[of] * turns.sent * (share == _BACKWARD)
        np.add.at(seconds, of, home)
        np.add.at(own, members, np.repeat(home, count))
        exposed = times * (count - 1) * np.maximum(0.0, hop - most) + home
        found.exposed_s[run] += np.bincount(of, exposed, len(seconds))
        passes.append(seconds)
    weights = pipeline.row_weights
    passes[1] += np.where(recomputed, passes[0], 0.0)
    found.forward_s[:, run], found.backward_s[:, run] = (np.outer(weights, one) for one in passes)
    found.own_s[work.members] = own
    found.ring_bytes[run] = work.ring_bytes * np.bincount(of, turns.sent, len(seconds))
    found.ring_bytes[run] *= np.where(recomputed, 1 + _FORWARD, 1.0)


def _blocks_s(
    plan: Plan,
    run: slice,
    work: MemberWork,
    cost_model: CostModel,
    stages: int,
    speeds: Float64Array,
) -> Float64Array:
    """Seconds of each member's blocks, both passes: those of the ring's steps and of locals.

    A part but the first has two a step: of its own keys, and of earlier parts'.
    """
    parts = plan.parts_of_each[run]
    steps = np.repeat((2 * parts - 1) * work.degrees, work.num_members)
    local = np.repeat(parts, work.num_members) * (work.local_s > 0)
    blocks: Float64Array = (steps + local) * block_s(cost_model, stages)
    return blocks / speeds[plan.ranks[work.members]]


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
