"""What no plan can beat: without pipeline stages, with them, and with experts that ranks share."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from megatron_hdp.arrays import Float64Array, Int64Array
from megatron_hdp.planner.cost_model import CostModel
from megatron_hdp.planner.flat_plan import PIECE, FlatPlan
from megatron_hdp.planner.pipeline import Pipeline

_MOST_LONGEST = 256
"""Greatest k of point 4 of ``pipeline_lower_bound_s``."""


def attention_s(lengths: Int64Array, cost_model: CostModel) -> Float64Array:
    """Seconds of attention of each whole sequence on one rank of speed 1."""
    s = lengths.astype(np.float64)
    if not cost_model.attention_points:
        seconds = cost_model.a * s
        seconds *= s  # in place, as are the others: there may be millions
        if cost_model.window_share:
            seconds = cost_model.a * cost_model.seen(s)
        s *= cost_model.attention_b
        seconds += s
        return seconds
    table = cost_model.attention_table
    x = np.concatenate([[0.0], table.lengths.astype(np.float64)])
    y = np.concatenate([[0.0], table.seconds])
    on_lines: Float64Array = np.interp(s, x, y)
    s -= x[-1]
    on_lines += (y[-1] - y[-2]) / (x[-1] - x[-2]) * np.maximum(s, 0.0, out=s)
    return on_lines


def compute_s(lengths: Int64Array, cost_model: CostModel) -> Float64Array:
    """Seconds of each whole sequence on one rank of speed 1, without blocks and g."""
    seconds = attention_s(lengths, cost_model)
    s = lengths.astype(np.float64)
    s *= cost_model.linear_s_per_token
    seconds += s
    return seconds


def total_compute_s(lengths: Int64Array, cost_model: CostModel) -> float:
    """The sum of ``compute_s``, as numpy sums it (halves of halves), but without its array."""
    if len(lengths) <= PIECE:
        return float(compute_s(lengths, cost_model).sum())
    half = len(lengths) // 2
    half -= half % 8
    return total_compute_s(lengths[:half], cost_model) + total_compute_s(lengths[half:], cost_model)


def speeds_of(cost_model: CostModel, num_ranks: int) -> Float64Array:
    """Speed of each rank.

    Raises:
        ValueError: the cost model has speeds, but not one for each rank.
    """
    if not cost_model.rank_speeds:
        return np.ones(num_ranks)
    if len(cost_model.rank_speeds) != num_ranks:
        raise ValueError(
            f"rank_speeds has {len(cost_model.rank_speeds)} entries; expected one for each of "
            f"{num_ranks} ranks"
        )
    return np.array(cost_model.rank_speeds, dtype=np.float64)


def _attention_of(length: int, cost_model: CostModel) -> float:
    """The same of one sequence."""
    if not cost_model.attention_points:
        seen = float(cost_model.seen(np.array([length], dtype=np.float64))[0])
        return cost_model.a * seen + cost_model.attention_b * float(length)
    return float(attention_s(np.array([length], dtype=np.int64), cost_model)[0])


def fixed_s(degrees: Float64Array, cost_model: CostModel, pipeline_stages: int = 1) -> Float64Array:
    """Seconds of a micro-batch of so many ranks whatever it holds: g, one block a step, a halo."""
    seconds = cost_model.g + degrees * block_s(cost_model, pipeline_stages)
    return seconds + np.where(degrees > 1, cost_model.halo_s, 0.0)


def block_s(cost_model: CostModel, pipeline_stages: int = 1) -> float:
    """Seconds of a block of attention whatever it holds, all layers, forward and backward."""
    return 2 * cost_model.num_layers * pipeline_stages * cost_model.block_s


def merge_s(degrees: Float64Array, tokens: Float64Array, cost_model: CostModel) -> Float64Array:
    """Seconds of a member with so many tokens for merging the results of its ring's steps."""
    seconds: Float64Array = cost_model.merge_b * (degrees - 1) * tokens
    return seconds


def sent_bytes(degrees: Float64Array, tokens: ArrayLike, cost_model: CostModel) -> Float64Array:
    """Bytes that a member of a ring of so many tokens sends: a third of them forward."""
    sent: Float64Array = (
        3 * (degrees - 1) / degrees * np.asarray(tokens) * cost_model.kv_bytes_per_token
    )
    return sent


def links_of(in_one_node: ArrayLike, cost_model: CostModel) -> tuple[Float64Array, Float64Array]:
    """Bandwidth of a ring's members, and the latency of a hop in one layer."""
    return (
        np.where(in_one_node, cost_model.intra_node_bytes_per_s, cost_model.inter_node_bytes_per_s),
        np.where(in_one_node, cost_model.intra_node_hop_s, cost_model.inter_node_hop_s),
    )


def exposed_s(
    degrees: Float64Array,
    transfer: Float64Array,
    hop: Float64Array,
    attention: Float64Array,
) -> Float64Array:
    """Seconds of ring traffic that attention does not hide, both passes; arrays of one shape.

    Args:
        degrees: Members D of the ring.
        transfer: Seconds that a member sends, latency left out; a third of it forward.
        hop: Latency of a hop over all layers, in one pass.
        attention: Seconds of a member's attention in D steps, a third of it forward.
    """
    hops = degrees - 1
    third, hiding = transfer / 3, hops / degrees * attention / 3
    forward = np.maximum(0.0, hops * hop + third - hiding)
    seconds: Float64Array = forward + np.maximum(0.0, hops * hop + 2 * third - 2 * hiding)
    return seconds


def own_times_s(
    length: int, num_ranks: int, cost_model: CostModel, pipeline_stages: int = 1
) -> Float64Array:
    """Seconds of a sequence alone on the D fastest ranks: with exposed traffic, blocks and g.

    Entry D - 1 is degree D. A member's time falls with its speed, so that the D-th fastest decides;
    a ring of up to ``ranks_per_node`` ranks is taken to have the better bandwidth and latency.
    """
    speeds = np.sort(speeds_of(cost_model, num_ranks))[::-1]
    degrees = np.arange(1, num_ranks + 1, dtype=np.float64)
    in_a_node = degrees <= cost_model.ranks_per_node
    bandwidth = np.where(
        in_a_node,
        max(cost_model.intra_node_bytes_per_s, cost_model.inter_node_bytes_per_s),
        cost_model.inter_node_bytes_per_s,
    )
    hop = (cost_model.num_layers * pipeline_stages) * np.where(
        in_a_node,
        min(cost_model.intra_node_hop_s, cost_model.inter_node_hop_s),
        cost_model.inter_node_hop_s,
    )
    transfer = sent_bytes(degrees, length, cost_model) / bandwidth
    attention = _attention_of(length, cost_model) / degrees
    compute = attention + cost_model.linear_s_per_token * length / degrees
    compute += merge_s(degrees, length / degrees, cost_model)
    exposed = exposed_s(degrees, transfer, hop, attention / speeds)
    fixed = fixed_s(degrees, cost_model, pipeline_stages)
    own: Float64Array = (compute + fixed) / speeds + exposed
    return own


def lower_bound_s(
    lengths: Int64Array, num_ranks: int, cost_model: CostModel, pipeline_stages: int = 1
) -> float:
    """max(total compute / sum of speeds, the longest time a sequence needs at its best degree).

    At every degree the time of a sequence, exposed traffic included, grows with its length:
    only the longest one counts. All stages together: with several it is no bound by itself.
    """
    speeds = speeds_of(cost_model, num_ranks)
    if len(lengths) == 0:
        return 0.0
    own = own_times_s(int(lengths.max()), num_ranks, cost_model, pipeline_stages)
    return max(total_compute_s(lengths, cost_model) / float(speeds.sum()), float(own.min()))


def lockstep_bound_s(
    lengths: Int64Array,
    num_ranks: int,
    cost_model: CostModel,
    expert_parallel_size: int,
) -> float:
    """No plan of ranks that share experts takes less than the greater of these two.

    1. Work. At position i a domain of E ranks with speeds v takes at least the dense time of each
       of its members, and x = ``b_experts`` x all its tokens / (E x the least v) on top. So the
       members' dense work at i is at most (sum of v) x (T(i) - x), and experts' work
       ``b_experts`` x tokens = E x (least v) x x at most (sum of v) x x. Together at most
       (sum of v) x T(i): summed over positions and domains, total compute is at most the sum of
       all speeds x the makespan.

    2. The longest sequence. On D ranks its members take their dense time as without experts
       (`own_times_s`), and one of the N / E domains has at least k = ceil(D E / N) of them, with
       1 / D of the sequence's tokens each, so that its experts take b_experts x s x k / (D E) on
       top, at the greatest speed. The least over D.

    Args:
        lengths: Tokens of each sequence.
        num_ranks: HDP ranks N.
        cost_model: With the ranks' speeds.
        expert_parallel_size: HDP ranks E of a domain.
    """
    if len(lengths) == 0:
        return 0.0
    speeds = speeds_of(cost_model, num_ranks)
    work_s = total_compute_s(lengths, cost_model) / float(speeds.sum())
    own_s = own_times_in_lockstep_s(int(lengths.max()), num_ranks, cost_model, expert_parallel_size)
    return max(work_s, float(own_s.min()))


def own_times_in_lockstep_s(
    length: int,
    num_ranks: int,
    cost_model: CostModel,
    expert_parallel_size: int,
    pipeline_stages: int = 1,
) -> Float64Array:
    """`own_times_s` where ranks share experts, as in point 2 of `lockstep_bound_s`."""
    size = expert_parallel_size
    if size == 1:
        return own_times_s(length, num_ranks, cost_model, pipeline_stages)
    dense = dataclasses.replace(cost_model, b_experts=0.0)
    degrees = np.arange(1, num_ranks + 1)
    beside = -(-degrees * size // num_ranks)
    shared_s = cost_model.b_experts * length * beside / (degrees * size)
    fastest = speeds_of(cost_model, num_ranks).max()
    own: Float64Array = own_times_s(length, num_ranks, dense, pipeline_stages) + shared_s / fastest
    return own


def pipeline_target_s(
    bound_s: float, tokens_per_rank: int, cost_model: CostModel, pipeline: Pipeline
) -> float:
    """Bound / P + (P - 1) / (P V) x the time of a micro-batch of one sequence that fills a rank.

    What a pipeline of P stages with V chunks takes for equal micro-batches of that time: a figure
    to compare with, neither always reachable (see ``pipeline_lower_bound_s``) nor a bound. Of
    uneven stages the slowest one's share is in the place of 1 / P.
    """
    one = float(compute_s(np.array([tokens_per_rank]), cost_model)[0])
    one += cost_model.g + block_s(cost_model, pipeline.stages)
    shares, weights = pipeline.stage_weights, pipeline.row_weights
    slowest = int(shares.argmax())
    others = float(weights[: pipeline.stages].sum() - weights[slowest])
    return bound_s * float(shares[slowest]) + others * one


def pipeline_bound_of(
    plan: FlatPlan, cost_model: CostModel, pipeline: Pipeline, expert_parallel_size: int = 1
) -> float:
    """`pipeline_lower_bound_s` where ranks hold what a plan lets them, by offload or without it."""
    held = plan.tokens_per_rank
    if plan.offload_ratios.any():  # at ratio 1 two layers stay resident
        held = -(-held * cost_model.num_layers // min(2, cost_model.num_layers))
    return pipeline_lower_bound_s(
        plan.lengths, plan.num_ranks, cost_model, pipeline, held, expert_parallel_size
    )


def pipeline_lower_bound_s(
    lengths: Int64Array,
    num_ranks: int,
    cost_model: CostModel,
    pipeline_stages: int | Pipeline,
    tokens_per_rank: int,
    expert_parallel_size: int = 1,
) -> float:
    """No 1F1B schedule with at most C tokens on a rank is faster than the greatest of these four.

    Row r takes the share w(r) of a micro-batch's time, a third of it forward; V chunks on each of P
    stages are P V rows, stage s being the rows s, s + P and so on, and W(s) the sum of theirs. All
    alike, w = 1 / (P V) and W = 1 / P. With V = 1 the schedule is plain 1F1B.

    1. Work. A stage of a rank of speed v does v units of its share of the compute a second: the
       makespan M is at least W x total compute / sum of speeds, W being the greatest W(s).

    2. The longest sequence h. Its micro-batch takes t >= own(D) on some degree D that fits. On the
       first row of each of the D members, forwards of earlier micro-batches end before forward h
       starts, backwards of later ones start after backward h ends, and forward h starts at least t
       before backward h ends (it passes all rows twice). Earlier micro-batches have w(0) / 3 of
       their time in these forwards, later ones 2 w(0) / 3 in backwards: M >= t + w(0) / 3 x (their
       time). So a member of speed v does at most 3 v (M - t) / w(0) of other compute. (Other
       sequences inside h's own micro-batch lengthen t by their whole time, which is worse.) It does
       at most v (M / W - t) as well, for the reason of 1, and any other rank at most v M / W; since
       a member can do less, the sum over all ranks is greatest if the slowest ranks are the
       members. All of it must be at least the compute of the other sequences: solved for M, the
       least over D.
       The parenthesis needs members of one speed, or a fast one has time for sequences of its own
       while h's slices keep a slow one busy; attention per token that never falls with the length,
       or a short sequence hides h's exposed traffic; and hops without latency, which any sequence
       hides. Without one of these, a member may spend all of h's t on computing, its share of h
       included: at most v t - compute of h / D is other compute.

    3. Sequences longer than N C / 2. Two of them are more than all ranks hold, so that on no stage
       their micro-batches run together: stage s is busy with them for W(s) x sum(t). The forward of
       each of them first passes the rows before s, in all R(s) of its time / 3, and its backward
       passes them last: M >= W(s) x sum(t) + R(s) x min(t), for every s.

    4. The k longest sequences, for every k. Let u be the least own time of the k-th, so that the
       micro-batch of each of the k takes at least u, and T the time of all such micro-batches of
       one rank. On stage s they take W(s) T; the forward of the first of them takes R(s) u / 3
       before, the backward of the last one 2 R(s) u / 3 after. The rank's other micro-batches stand
       before (their forwards on the first row come on top), in between (all they take on stage s
       does) or behind (backwards): M >= W(s) T + R(s) u + w(0) / 3 x (their time). So a rank that
       takes part, with T >= u, works for at most T + min(M / W(s) - T, 3 (M - W(s) T - R(s) u) /
       w(0)); any other for M / W(s). On average over the ranks, by speed, T is at least the compute
       of the k sequences over the sum of speeds, and the work at least total compute over it: this
       point must lie under the concave hull of what a rank can do. Solved for M by bisection, for
       every s.

    Where E ranks share experts, domains are in the place of ranks, positions in that of
    micro-batches: of speeds v a domain computes at most (sum of v) x T at a position that takes T
    (`lockstep_bound_s`), whatever stands there, and a position with a sequence takes at least its
    own time in lockstep. In point 2 the members' ranks are whole domains, whose other ranks compute
    meanwhile: what is said without the parenthesis holds.

    Args:
        lengths: Tokens of each sequence.
        num_ranks: HDP ranks N.
        cost_model: With the ranks' speeds.
        pipeline_stages: Stages P of each rank, or the whole pipeline that it is.
        tokens_per_rank: C; where activations are offloaded, the most that a rank may hold then.
        expert_parallel_size: HDP ranks E that share experts.
    """
    if len(lengths) == 0:
        return 0.0
    pipeline = pipeline_stages
    if not isinstance(pipeline, Pipeline):
        pipeline = Pipeline(pipeline)
    stages = pipeline.stages
    speeds = speeds_of(cost_model, num_ranks)
    compute = compute_s(lengths, cost_model)
    shares = pipeline.stage_weights
    before = np.cumsum(pipeline.row_weights[:stages]) - pipeline.row_weights[:stages]
    work_s = float(compute.sum() / speeds.sum() * shares.max())

    def own_times_of(length: int) -> Float64Array:
        """At the degrees at which a rank holds the sequence's share."""
        own_s = own_times_in_lockstep_s(length, num_ranks, cost_model, expert_parallel_size, stages)
        return own_s[min(num_ranks, -(-length // tokens_per_rank)) - 1 :]

    h = int(np.argmax(lengths))
    own_s = own_times_of(int(lengths[h]))
    domains = np.sort(speeds.reshape(-1, expert_parallel_size).sum(axis=1))
    beside = np.arange(num_ranks - len(own_s), num_ranks) // expert_parallel_size
    is_alone = expert_parallel_size == 1 and _nothing_fits_beside(cost_model)
    longest_s = _beside_the_longest_s(
        own_s,
        np.cumsum(domains)[beside],
        float(speeds.sum()),
        float(compute.sum() - compute[h]),
        pipeline,
        None if is_alone else float(compute[h]),
    )
    exclusive_s = [
        float(own_times_of(length).min())
        for length in lengths[2 * lengths > num_ranks * tokens_per_rank].tolist()
    ]
    in_turn_s = float((shares * sum(exclusive_s) + before * min(exclusive_s, default=0.0)).max())
    longest_ones = _LongestOnes.of(lengths, compute, float(speeds.sum()), own_times_of)
    several_s = max(
        longest_ones.beside_them_s(share, ramp, float(pipeline.row_weights[0]))
        for share, ramp in set(zip(shares.tolist(), before.tolist(), strict=True))
        if share > 0
    )
    return max(work_s, longest_s, in_turn_s, several_s)


def _nothing_fits_beside(cost_model: CostModel) -> bool:
    """Whether what else is in the longest sequence's micro-batch lengthens it by its whole time."""
    without_latency = cost_model.intra_node_hop_s == cost_model.inter_node_hop_s == 0
    of_one_speed = len(set(cost_model.rank_speeds)) <= 1
    return without_latency and of_one_speed and cost_model.attention_table.rises_per_token


def _beside_the_longest_s(
    own_s: Float64Array,
    members: Float64Array,
    all_ranks: float,
    rest: float,
    pipeline: Pipeline,
    compute_s: float | None,
) -> float:
    """Point 2 of ``pipeline_lower_bound_s``; the arrays have one entry a degree.

    Args:
        own_s: Time t of the longest sequence.
        members: Sum of the speeds of its members.
        all_ranks: Sum of all speeds.
        rest: Compute of the other sequences.
        pipeline: That each rank is.
        compute_s: Compute of the longest sequence; None if nothing fits beside it.
    """
    # rest <= members x 3 (M - t) / w + (all - members) x M / W, and the same with M / W - t; where
    # something fits beside it, members x t - compute of it more
    beside = 0.0 if compute_s is None else members * own_s - compute_s
    whole, first = 1 / float(pipeline.stage_weights.max()), float(pipeline.row_weights[0]) / 3
    slopes = members + first * whole * (all_ranks - members)  # of first x the work in M
    latency = (first * (rest - beside) + members * own_s) / slopes
    work = (rest - beside + members * own_s) / (whole * all_ranks)
    return float(np.maximum(own_s, np.maximum(latency, work)).min())


@dataclasses.dataclass(frozen=True, eq=False)
class _LongestOnes:
    """Point 4 of ``pipeline_lower_bound_s``; arrays have one entry for each k."""

    least_s: Float64Array
    """u, the least own time of the k-th."""
    of_them: Float64Array
    """Compute of the k, over the sum of speeds."""
    of_all: float

    @classmethod
    def of(
        cls,
        lengths: Int64Array,
        compute: Float64Array,
        speed: float,
        own_times_of: Callable[[int], Float64Array],
    ) -> Self:
        order = np.argsort(-lengths, kind="stable")[:_MOST_LONGEST]
        least_s = np.array([own_times_of(length).min() for length in lengths[order].tolist()])
        return cls(least_s, np.cumsum(compute[order]) / speed, float(compute.sum()) / speed)

    def beside_them_s(self, share: float, ramp: float, first: float) -> float:
        """The least makespan that a stage allows.

        Args:
            share: W of the stage.
            ramp: R of it.
            first: w of the first row.
        """
        low = np.zeros(len(self.least_s))
        high = np.full(len(low), self.of_all + float(self.least_s.max()))
        slope = 3 * share / first if first > 0 else np.inf
        for _ in range(50):
            makespan = (low + high) / 2
            ramps = ramp / share * self.least_s
            work = _work_beside(self.of_them, makespan / share, ramps, self.least_s, slope)
            fits = work >= self.of_all
            low, high = np.where(fits, low, makespan), np.where(fits, makespan, high)
        return float(low.max())


def _work_beside(
    at: Float64Array, whole: Float64Array, ramps: Float64Array, least: Float64Array, slope: float
) -> Float64Array:
    """Concave hull at T = ``at`` of a rank's work: whole at T = 0, less from T = ``least`` on.

    Other work is at most whole - T, and at most ``slope`` x (whole - ramps - T).
    """
    full = whole - ramps  # the greatest T, with no other work
    corner = least
    if slope > 1:  # up to some T nothing is lost
        lost = 1.0 if math.isinf(slope) else slope / (slope - 1)
        corner = np.maximum(least, whole - lost * ramps)
    at_corner = whole
    if not math.isinf(slope):
        at_corner = corner + np.minimum(whole - corner, slope * (full - corner))

    def chord(x0: Float64Array, y0: Float64Array, x1: Float64Array, y1: Float64Array) -> Any:
        slope = (y1 - y0) / np.where(x1 > x0, x1 - x0, 1.0)
        return np.where((at >= x0) & (at <= x1), y0 + slope * (at - x0), -np.inf)

    zero = np.zeros_like(at)
    work: Float64Array = np.maximum.reduce(
        [
            chord(zero, whole, full, full),
            chord(zero, whole, corner, at_corner),
            chord(corner, at_corner, full, full),
        ]
    )
    return np.where(full >= least, work, -np.inf)
