"""Seconds of each micro-batch in each pass: its ring hop by hop, noise, copies to the host."""

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from megatron_hdp.arrays import Float64Array, Int64Array
from megatron_hdp.planner import CostModel, Plan
from megatron_hdp.planner.bounds import block_s, speeds_of
from megatron_hdp.planner.flat_plan import pieces
from megatron_hdp.planner.member_work import MemberWork, copies_of_stream, work_of
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
    """Of each member, padding included; of a stream those of its fullest part."""
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
    rounds: Float64Array
    """Times that something goes around. Keys of a stream's earlier parts on the host go around part
    by part, the first with the part's own."""
    member: Int64Array
    """Entries of the members of all turns, one turn behind the other, in those of the run."""

    @classmethod
    def of(cls, plan: Plan, run: slice, work: MemberWork, cost_model: CostModel) -> Self:
        """Cut what runs in parts."""
        parts, on_host = plan.parts_of_each[run], plan.streams_from_host[run]
        shares, rounds = np.ones((2, int(parts.sum()))), np.ones(int(parts.sum()))
        begins = np.cumsum(parts) - parts
        for m in np.flatnonzero(parts > 1).tolist():
            mine = slice(begins[m], begins[m] + parts[m])
            sizes = sizes_of_parts(plan, run.start + m)
            is_cut = work.num_members[m] > 1 or plan.is_stream[run.start + m]
            if is_cut and sum(size.tokens for size in sizes):
                query_ratio = 0.0 if on_host[m] else cost_model.query_ratio
                shares[:, mine] = shares_of_parts(sizes, query_ratio)
                if on_host[m]:
                    rounds[mine] = np.maximum(1, np.arange(parts[m]))
            else:
                shares[:, mine] = 1 / parts[m]
        micro_batch = np.repeat(np.arange(len(parts)), parts)
        count = work.num_members[micro_batch]
        skipped = work.first_members[micro_batch] - (np.cumsum(count) - count)
        member = np.arange(int(count.sum())) + np.repeat(skipped, count)
        return cls(micro_batch, parts[micro_batch], shares[0], shares[1], rounds, member)


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
        copies_s = _copies_of_streams(plan, run, work, cost_model)
        _passes(found, plan, run, work, turns, blocks_s, copies_s, pipeline, factors)
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
    plan: Plan,
    run: slice,
    work: MemberWork,
    turns: _Turns,
    blocks_s: Float64Array,
    copies_s: tuple[Float64Array, Float64Array],
    pipeline: Pipeline,
    factors: Float64Array | None,
) -> None:
    """Both passes of a run of micro-batches: three parts of compute, then the ring's turns.

    Backward of what runs twice begins with one more forward.
    """
    runs_twice = plan.runs_twice[run]
    of, members, count = turns.micro_batch, turns.member, work.num_members[turns.micro_batch]
    factor = np.ones(len(work.attention_s)) if factors is None else factors
    # blocks take as long backward as forward; of local_s and fixed_s they are a part
    smooth = work.linear_s + work.local_s + work.fixed_s - blocks_s
    own = np.zeros(len(factor))
    passes = []
    forwards = 1 + runs_twice
    both = (_FORWARD, forwards, copies_s[0]), (_BACKWARD, np.ones(len(forwards)), copies_s[1])
    for share, of_each, copied_s in both:
        times = of_each[of]
        lead = (factor * (share * smooth + blocks_s / 2))[members]
        lead = lead / np.repeat(turns.num_parts, count)
        attention = (factor * share * work.attention_s)[members]
        step = attention * np.repeat(turns.seen / count, count)
        hops = np.maximum(1, count - 1)
        hop = share * work.transfer_s[of] * turns.sent / hops + work.hop_s[of] * turns.rounds
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
        own += copied_s * np.repeat(of_each, work.num_members)
        copied_s = np.maximum.reduceat(copied_s, work.first_members)
        found.copies_s[run] += of_each * copied_s
        passes.append(seconds + copied_s)
    weights = pipeline.row_weights
    passes[1] += np.where(runs_twice, passes[0], 0.0)
    found.forward_s[:, run], found.backward_s[:, run] = (np.outer(weights, one) for one in passes)
    found.own_s[work.members] = own
    found.ring_bytes[run] = work.ring_bytes * np.bincount(of, turns.sent, len(seconds))
    found.ring_bytes[run] += work.made_bytes
    found.ring_bytes[run] *= np.where(runs_twice, 1 + _FORWARD, 1.0)


def _blocks_s(
    plan: Plan,
    run: slice,
    work: MemberWork,
    cost_model: CostModel,
    stages: int,
    speeds: Float64Array,
) -> Float64Array:
    """Seconds of each member's blocks, both passes: those of the ring's steps and of locals.

    A part but the first has two a step: of its own keys, and of earlier parts'; one for each of
    these, where they wait on the host.
    """
    parts = plan.parts_of_each[run]
    earlier = np.where(plan.streams_from_host[run], parts * (parts - 1) // 2, parts - 1)
    steps = np.repeat((parts + earlier) * work.degrees, work.num_members)
    local = np.repeat(parts, work.num_members) * (work.local_s > 0)
    blocks: Float64Array = (steps + local) * block_s(cost_model, stages)
    return blocks / speeds[plan.ranks[work.members]]


def _copies_of_streams(
    plan: Plan, run: slice, work: MemberWork, cost_model: CostModel
) -> tuple[Float64Array, Float64Array]:
    """What members wait for keys from the host, in one forward and in what follows in backward."""
    found = np.zeros((2, len(work.attention_s)))
    for m in np.flatnonzero(plan.streams_from_host[run]).tolist():
        first = int(work.first_members[m])
        members = slice(first, first + int(work.num_members[m]))
        found[:, members] = copies_of_stream(plan, cost_model, run.start + m, work, members)
    return found[0], found[1]


def _add_copies(
    found: MicroBatchTimes,
    plan: Plan,
    cost_model: CostModel,
    pipeline: Pipeline,
    row_layers: Int64Array,
) -> None:
    """What leaves for the host, on the member that has most of it; each row sends its share.

    Of streams that is in their times.
    """
    some = np.flatnonzero(plan.offload_ratios * ~plan.is_stream)
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
    added_s = np.where(plan.is_stream, 0.0, found.copies_s)
    np.add(found.own_s, np.repeat(added_s, np.diff(plan.rank_offsets)), out=found.own_s)
