"""What no plan whose ranks are pipelines can beat, with micro-batches whole or in parts."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from megatron_hdp.arrays import BoolArray, Float64Array, Int64Array
from megatron_hdp.planner.bounds import (
    block_s,
    compute_s,
    own_times_in_lockstep_s,
    speeds_of,
)
from megatron_hdp.planner.cost_model import CostModel
from megatron_hdp.planner.flat_plan import FlatPlan
from megatron_hdp.planner.pipeline import Pipeline

_LONGEST = np.unique(np.geomspace(1, 256, 96).round().astype(np.int64))
"""The numbers k of point 4 of ``pipeline_lower_bound_s`` that are looked at."""

_MOST_TOGETHER = 2**15
"""Own times of sequences, numbers of parts and degrees that are looked at together: a cache holds
them."""

_TWICE = 4 / 3
"""What a second forward makes of compute."""

_FEW_PARTS = 8
"""Up to so many parts each number is looked at by itself, above it from one to its double."""


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
    plan: FlatPlan,
    cost_model: CostModel,
    pipeline: Pipeline,
    expert_parallel_size: int = 1,
    most_parts: int | None = None,
) -> float:
    """`pipeline_lower_bound_s` where ranks hold what a plan lets them, by offload or without it.

    Micro-batches may run in ``most_parts`` parts; by default in as many as one of the plan does
    that is no stream. They may stream where one of the plan's does.
    """
    held, is_no_stream = plan.tokens_per_rank, ~plan.is_stream
    if plan.offload_ratios[is_no_stream].any():
        held = most_held(held, cost_model)
    if plan.recomputed is not None:
        held = max(held, most_recomputed(plan.tokens_per_rank, plan.recomputed_share))
    if most_parts is None:
        most_parts = int(plan.parts_of_each[is_no_stream].max(initial=1))
    return pipeline_lower_bound_s(
        *(plan.lengths, plan.num_ranks, cost_model, pipeline, held),
        *(expert_parallel_size, most_parts, plan.streams is not None),
    )


def most_held(tokens_per_rank: int, cost_model: CostModel) -> int:
    """Tokens that a rank holds at most with offload: at ratio 1 two layers stay resident."""
    return -(-tokens_per_rank * cost_model.num_layers // min(2, cost_model.num_layers))


def most_recomputed(tokens_per_rank: int, recomputed_share: float) -> int:
    """Tokens that a rank holds at most of what is recomputed in backward."""
    return math.ceil(tokens_per_rank / recomputed_share)


def pipeline_lower_bound_s(
    lengths: Int64Array,
    num_ranks: int,
    cost_model: CostModel,
    pipeline_stages: int | Pipeline,
    tokens_per_rank: int,
    expert_parallel_size: int = 1,
    most_parts: int = 1,
    streams: bool = False,
) -> float:
    """No 1F1B schedule with at most C tokens on a rank is faster than the greatest of these four.

    Row r takes the share w(r) of a micro-batch's time, a third of it forward; V chunks on each of P
    stages are P V rows, stage s being the rows s, s + P and so on, and W(s) the sum of theirs. All
    alike, w = 1 / (P V) and W = 1 / P. With V = 1 the schedule is plain 1F1B.

    Recomputation. Backward takes a forward longer then, and nothing else less: what holds for plans
    without it holds, if more tokens fit.

    Parts. A micro-batch that takes t in c parts, each t / c, is on its way from the first row to
    the last and back for at least L = t (x + (1 - x) / c), x being the greatest w(r): that row
    takes w(r) t for all parts, and before and behind it the first and the last part of each pass
    take their t / c on the other rows. All alike it is t / P x (1 + (P - 1) / c); whole it is t.
    Parts are launched, and their rings turned, one by one, and what travels for all of them is at
    least what the whole's keys are, or its queries where these are less (`own_times_s`): t never
    falls with c, and t / c never rises. A range of c is looked at with the t of its least and the
    t / c of its greatest one.

    Streams. A sequence may stream on any number of ranks, whatever they hold. Then its time t is at
    least 4 / 3 of what it computes, blocks and g once; its L is at least x t, which the row of x
    takes for all parts, and p of point 4 is 0. A third of what it computes is forward, as of
    others.

    1. Work. A stage of a rank of speed v does v units of its share of the compute a second: the
       makespan M is at least W x total compute / sum of speeds, W being the greatest W(s).

    2. The longest sequence h. Its micro-batch takes t >= own(D, c) on some degree D that fits, in
       some c parts. On the first row of each of the D members, forwards of earlier micro-batches
       end before forward h starts, backwards of later ones start after backward h ends, and forward
       h starts at least L before backward h ends. Earlier micro-batches have w(0) / 3 of their time
       in these forwards, later ones 2 w(0) / 3 in backwards: M >= L + w(0) / 3 x (their time). So a
       member of speed v does at most 3 v (M - L) / w(0) of other compute. (Other sequences inside
       h's own micro-batch lengthen L by at least w(0) of their time, which is worse.) It does at
       most v (M / W - t) as well, for the reason of 1, and any other rank at most v M / W; since
       a member can do less, the sum over all ranks is greatest if the slowest ranks are the
       members. All of it must be at least the compute of the other sequences: solved for M, the
       least over D and c.
       The parenthesis needs members of one speed, or a fast one has time for sequences of its own
       while h's slices keep a slow one busy; attention per token that never falls with the length,
       or a short sequence hides h's exposed traffic; and hops without latency, which any sequence
       hides. Without one of these, a member may spend all of h's t on computing, its share of h
       included: at most v t - compute of h / D is other compute.

    3. Sequences longer than N C / 2, where none may stream. Two of them are more than all ranks
       hold, so that on no stage their micro-batches run together: stage s is busy with them for
       W(s) x sum(t). The forward of each of them first passes the rows before s, in R(s) of a
       part's time / 3, and its backward passes them last: M >= W(s) x sum(t) + R(s) x (t / 3 c of
       the first + 2 t / 3 c of the last), for every s. Each has the c that makes its own terms
       least; as these are concave in the share of R(s) that it bears, no two bear less than one of
       them does.

    4. The k longest sequences, for many k. Let u be the least own time of the k-th, so that the
       micro-batch of each of the k takes at least u, p its least time of a part, and T the time of
       all such micro-batches of one rank. On stage s they take W(s) T; the forward of the first of
       them takes R(s) p / 3 before, the backward of the last one 2 R(s) p / 3 after. The rank's
       other micro-batches stand before (their forwards on the first row come on top), in between
       (all they take on stage s does) or behind (backwards): M >= W(s) T + R(s) p + y x (their
       time), y being the lesser of w(0) / 3 and W(s). So a rank that takes part, with T >= u, works
       for at most T + min(M / W(s) - T, (M - W(s) T - R(s) p) / y); any other for M / W(s). On
       average over the ranks, by speed, T is at least the compute of the k sequences over the sum
       of speeds, and the work at least total compute over it: this point must lie under the concave
       hull of what a rank can do. Solved for M by bisection, for every s.

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
        tokens_per_rank: C; where activations are offloaded or recomputed, the most that a rank may
            hold then.
        expert_parallel_size: HDP ranks E that share experts.
        most_parts: The greatest c; 1: micro-batches run whole.
        streams: Whether sequences may stream.
    """
    if len(lengths) == 0:
        return 0.0
    pipeline = pipeline_stages
    if not isinstance(pipeline, Pipeline):
        pipeline = Pipeline(pipeline)
    own = _OwnTimes(
        num_ranks,
        with_least_traffic(cost_model) if most_parts > 1 else cost_model,
        pipeline.stages,
        tokens_per_rank,
        expert_parallel_size,
        most_parts,
        streams,
    )
    speeds = speeds_of(cost_model, num_ranks)
    compute = compute_s(lengths, cost_model)
    shares = pipeline.stage_weights
    before = (
        np.cumsum(pipeline.row_weights[: pipeline.stages]) - pipeline.row_weights[: len(shares)]
    )
    work_s = float(compute.sum() / speeds.sum() * shares.max())
    h = int(np.argmax(lengths))
    domains = np.sort(speeds.reshape(-1, expert_parallel_size).sum(axis=1))
    beside = np.arange(num_ranks) // expert_parallel_size
    is_alone = expert_parallel_size == 1 and _nothing_fits_beside(cost_model)
    longest_s = _beside_the_longest_s(
        next(own.of(lengths[h : h + 1])),
        np.cumsum(domains)[beside],
        float(speeds.sum()),
        float(compute.sum() - compute[h]),
        pipeline,
        None if is_alone else float(compute[h]),
    )
    exclusive = lengths[(2 * lengths > num_ranks * tokens_per_rank) & (not streams)]
    in_turn_s = 0.0
    if len(exclusive):
        times = list(own.of(exclusive))
        for share, ramp in zip(shares.tolist(), before.tolist(), strict=True):
            without_s = _least_s(times, share, 0.0)
            borne_s = _least_s(times, share, ramp) - without_s
            in_turn_s = max(in_turn_s, float(without_s.sum() + borne_s.min()))
    longest_ones = _LongestOnes.of(lengths, compute, float(speeds.sum()), own)
    works = shares > 0
    several_s = longest_ones.beside_them_s(
        shares[works], before[works], float(pipeline.row_weights[0])
    )
    return max(work_s, longest_s, in_turn_s, several_s)


def with_least_traffic(cost_model: CostModel) -> CostModel:
    """Where less goes around if a part's queries travel than if its keys do, all of it does.

    Nor does a member make keys of latents then that are not its own.
    """
    least = min(1.0, cost_model.query_ratio or 1.0)
    return dataclasses.replace(
        cost_model,
        kv_bytes_per_token=least * cost_model.kv_bytes_per_token,
        merge_b=cost_model.merge_b - cost_model.projection_b,
        projection_b=0.0,
    )


class _Times(NamedTuple):
    """Own times of sequences in ranges of numbers of parts: ``[sequences, ranges, degrees]``."""

    whole_s: Float64Array
    """t with the fewest parts of the range."""
    part_s: Float64Array
    """t / c with the most."""
    fits: BoolArray
    """Whether a rank of so many can hold its share; any can of a stream, which is a range more."""


class _OwnTimes(NamedTuple):
    """What sequences take alone, at the degrees at which they fit, in any number of parts."""

    num_ranks: int
    cost_model: CostModel
    stages: int
    tokens_per_rank: int
    expert_parallel_size: int
    most_parts: int
    streams: bool

    def of(self, lengths: Int64Array, ranges: Int64Array | None = None) -> Iterator[_Times]:
        """A few sequences at a time; ranges are rows of a fewest and a most number of parts."""
        fewest, most = self._ranges() if ranges is None else ranges
        num = max(1, _MOST_TOGETHER // self.num_ranks // len(most))
        degrees = np.arange(1, self.num_ranks + 1)
        for begin in range(0, len(lengths), num):
            some = lengths[begin : begin + num]
            whole_s = in_most_s = self._in_parts(some, fewest)
            if (most > fewest).any():
                in_most_s = self._in_parts(some, most)
            least = np.minimum(self.num_ranks, -(-some // self.tokens_per_rank))
            fits = degrees >= least[:, None, None]
            times = whole_s, in_most_s / most[:, None], np.broadcast_to(fits, whole_s.shape)
            yield _Times(*times) if not self.streams else self._with_streams(some, *times)

    def _with_streams(
        self, lengths: Int64Array, whole_s: Float64Array, part_s: Float64Array, fits: BoolArray
    ) -> _Times:
        """The same and, as one more range, what the sequences take at least as streams."""
        free = dataclasses.replace(
            self.cost_model, kv_bytes_per_token=0.0, intra_node_hop_s=0.0, inter_node_hop_s=0.0
        )
        computed = self._replace(cost_model=free)
        streamed_s = computed._in_parts(lengths, np.ones(1, dtype=np.int64)) * _TWICE
        return _Times(
            np.concatenate([whole_s, streamed_s], axis=1),
            np.concatenate([part_s, np.zeros_like(streamed_s)], axis=1),
            np.concatenate([fits, np.ones_like(streamed_s, dtype=np.bool_)], axis=1),
        )

    def _ranges(self) -> Int64Array:
        few = np.arange(1, min(self.most_parts, _FEW_PARTS) + 1)
        doublings = ((self.most_parts - 1) // _FEW_PARTS).bit_length()
        doubled = _FEW_PARTS * 2 ** np.arange(doublings)
        fewest = np.append(few, doubled + 1)
        return np.stack([fewest, np.append(few, np.minimum(2 * doubled, self.most_parts))])

    def _in_parts(self, lengths: Int64Array, parts: Int64Array) -> Float64Array:
        tokens, num = np.broadcast_arrays(lengths[:, None], parts)
        return own_times_in_lockstep_s(
            tokens, self.num_ranks, self.cost_model, self.expert_parallel_size, self.stages, num
        )


def _least_s(times: Sequence[_Times], share: float, ramp: float) -> Float64Array:
    """The least W t + R t / c of each sequence, over degrees that fit and numbers of parts."""
    seconds = [share * one.whole_s + ramp * one.part_s for one in times]
    least = [
        of_some.min(axis=(1, 2), where=one.fits, initial=np.inf)
        for of_some, one in zip(seconds, times, strict=True)
    ]
    return np.concatenate(least)


def _nothing_fits_beside(cost_model: CostModel) -> bool:
    """Whether what else is in the longest sequence's micro-batch lengthens it by its whole time."""
    without_latency = cost_model.intra_node_hop_s == cost_model.inter_node_hop_s == 0
    of_one_speed = len(set(cost_model.rank_speeds)) <= 1
    return without_latency and of_one_speed and cost_model.attention_table.rises_per_token


def _beside_the_longest_s(
    own: _Times,
    members: Float64Array,
    all_ranks: float,
    rest: float,
    pipeline: Pipeline,
    compute_s: float | None,
) -> float:
    """Point 2 of ``pipeline_lower_bound_s``; the last axis of the arrays is that of degrees.

    Args:
        own: Times of the longest sequence.
        members: Sum of the speeds of its members.
        all_ranks: Sum of all speeds.
        rest: Compute of the other sequences.
        pipeline: That each rank is.
        compute_s: Compute of the longest sequence; None if nothing fits beside it.
    """
    # rest <= members x 3 (M - L) / w + (all - members) x M / W, and the same with M / W - t; where
    # something fits beside it, members x t - compute of it more
    own_s = own.whole_s
    longest_row = float(pipeline.row_weights.max())
    pass_s = longest_row * own_s + (1 - longest_row) * own.part_s
    beside = 0.0 if compute_s is None else members * own_s - compute_s
    whole, first = 1 / float(pipeline.stage_weights.max()), float(pipeline.row_weights[0]) / 3
    slopes = members + first * whole * (all_ranks - members)  # of first x the work in M
    latency = (first * (rest - beside) + members * pass_s) / slopes
    work = (rest - beside + members * own_s) / (whole * all_ranks)
    least_s = np.maximum(pass_s, np.maximum(latency, work))
    return float(least_s.min(where=own.fits, initial=np.inf))


@dataclasses.dataclass(frozen=True, eq=False)
class _LongestOnes:
    """Point 4 of ``pipeline_lower_bound_s``; arrays have one entry for each k."""

    least_s: Float64Array
    """u, the least own time of the k-th."""
    part_s: Float64Array
    """p, its least time of a part."""
    of_them: Float64Array
    """Compute of the k, over the sum of speeds."""
    of_all: float

    @classmethod
    def of(cls, lengths: Int64Array, compute: Float64Array, speed: float, own: _OwnTimes) -> Self:
        order = np.argsort(-lengths, kind="stable")[: _LONGEST[-1]]
        last = _LONGEST[len(order) >= _LONGEST] - 1  # of each k
        times = list(own.of(lengths[order[last]], np.array([[1], [own.most_parts]])))
        least_s, part_s = _least_s(times, 1.0, 0.0), _least_s(times, 0.0, 1.0)
        of_them = np.cumsum(compute[order])[last] / speed
        return cls(least_s, part_s, of_them, float(compute.sum()) / speed)

    def beside_them_s(self, shares: Float64Array, ramps: Float64Array, first: float) -> float:
        """The least makespan that every stage allows.

        Args:
            shares: W of each stage, more than 0.
            ramps: R of each.
            first: w of the first row.
        """
        shares = shares[:, None]  # beside k, the last axis
        slopes = np.maximum(1.0, 3 * shares / first) if first > 0 else np.full_like(shares, np.inf)
        ramps_s = ramps[:, None] / shares * self.part_s
        low = np.zeros(ramps_s.shape)
        high = np.full(low.shape, self.of_all + float(self.least_s.max()))
        for _ in range(50):
            makespan = (low + high) / 2
            work = _work_beside(self.of_them, makespan / shares, ramps_s, self.least_s, slopes)
            fits = work >= self.of_all
            low, high = np.where(fits, low, makespan), np.where(fits, makespan, high)
        return float(low.max())


def _work_beside(
    at: Float64Array,
    whole: Float64Array,
    ramps: Float64Array,
    least: Float64Array,
    slopes: Float64Array,
) -> Float64Array:
    """Concave hull at T = ``at`` of a rank's work: whole at T = 0, less from T = ``least`` on.

    Other work is at most whole - T, and at most ``slopes`` x (whole - ramps - T).
    """
    full = whole - ramps  # the greatest T, with no other work
    if math.isinf(slopes[0, 0]):
        corner = np.maximum(least, full)  # up to some T nothing is lost
        at_corner = whole
    else:
        lost = slopes / np.where(slopes > 1, slopes - 1, 1.0)
        corner = np.where(slopes > 1, np.maximum(least, whole - lost * ramps), least)
        at_corner = corner + np.minimum(whole - corner, slopes * (full - corner))

    def chord(x0: Any, y0: Float64Array, x1: Float64Array, y1: Float64Array) -> Any:
        width = x1 - x0
        slope = (y1 - y0) / np.where(width > 0, width, 1.0)
        return np.where((at >= x0) & (at <= x1), y0 + slope * (at - x0), -np.inf)

    work: Float64Array = np.maximum(
        np.maximum(chord(0.0, whole, full, full), chord(0.0, whole, corner, at_corner)),
        chord(corner, at_corner, full, full),
    )
    return np.where(full >= least, work, -np.inf)
