"""Checks a plan against its rules, whoever made it: shape, cover, fit, order."""

import math
from collections.abc import Callable
from typing import NoReturn

import numpy as np

from megatron_hdp.arrays import AnyArray, BoolArray, Float64Array, Int64Array
from megatron_hdp.planner.flat_plan import (
    PIECE,
    FlatPlan,
    PlanError,
    counts_of,
    owners_of,
    pieces,
    span_of,
)
from megatron_hdp.planner.slices import slice_tokens_array


def validate(plan: FlatPlan, *, pipeline_stages: int = 1, num_layers: int | None = None) -> None:
    """Raises PlanError for the first broken rule; see ``Plan.validate``."""
    if pipeline_stages < 1:
        raise ValueError(f"pipeline_stages is {pipeline_stages}; expected at least 1")
    if num_layers is not None and num_layers < 1:
        raise ValueError(f"num_layers is {num_layers}; expected at least 1")
    _check_shape(plan)
    _check_cover(plan)
    _check_order(plan)
    _check_fit(plan, num_layers)
    if plan.positions is not None:
        _check_places(plan, plan.positions)
    elif pipeline_stages > 1:
        _check_positions(plan)


def _check_shape(plan: FlatPlan) -> None:
    for name in ("num_ranks", "tokens_per_rank", "slice_multiple"):
        if getattr(plan, name) < 1:
            raise PlanError("shape", f"{name} is {getattr(plan, name)}; expected at least 1")
    if plan.lengths.ndim != 1 or (len(plan.lengths) and plan.lengths.min() < 1):
        raise PlanError("shape", f"sequence {_first(plan.lengths < 1)} has no token")
    _check_offsets("rank_offsets", plan.rank_offsets, len(plan.ranks))
    num_micro_batches = plan.num_micro_batches
    for name, values in (("sequence", plan.sequences), ("local", plan.local_sequences)):
        offsets = getattr(plan, f"{name}_offsets")
        _check_offsets(f"{name}_offsets", offsets, len(values))
        if len(offsets) != num_micro_batches + 1:
            raise PlanError(
                "shape",
                f"{name}_offsets has {len(offsets)} entries; expected {num_micro_batches + 1}",
            )
    if len(plan.local_ranks) != len(plan.local_sequences):
        raise PlanError(
            "shape",
            f"local_ranks has {len(plan.local_ranks)} entries; "
            f"local_sequences has {len(plan.local_sequences)}",
        )
    _check_micro_batches(plan)


def _check_offsets(name: str, offsets: Int64Array, end: int) -> None:
    if offsets.ndim != 1 or len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != end:
        found = f"{offsets[0]} to {offsets[-1]}" if offsets.size else "nothing"
        raise PlanError("shape", f"{name} runs from {found}; expected 0 to {end}")
    falls = _first_where(len(offsets) - 1, lambda run: counts_of(offsets, run) < 0)
    if falls is not None:
        raise PlanError("shape", f"{name} falls after entry {falls}")


def _check_micro_batches(plan: FlatPlan) -> None:
    num_micro_batches = plan.num_micro_batches
    m = _first_where(num_micro_batches, lambda run: counts_of(plan.rank_offsets, run) == 0)
    if m is not None:
        raise PlanError("shape", f"micro-batch {m} has no ranks")
    m = _first_where(
        num_micro_batches,
        lambda run: counts_of(plan.sequence_offsets, run) + counts_of(plan.local_offsets, run) == 0,
    )
    if m is not None:
        raise PlanError("shape", f"micro-batch {m} has no sequences")
    for run in pieces(plan.rank_offsets, plan.local_offsets):
        there, owner = _entries(plan.local_offsets, run)
        falls = (np.diff(plan.local_ranks[there]) < 0) & (np.diff(owner) == 0)
        if falls.any():
            m = run.start + owner[_first(falls)]
            raise PlanError("shape", f"local_ranks of micro-batch {m} are not ascending")
    _check_ratios(plan.offload_ratios, num_micro_batches)
    if plan.num_parts is not None:
        _check_parts(plan.num_parts, plan.linear_tokens, num_micro_batches)
    if plan.streams is not None:
        _check_streams(plan, plan.streams)
    if plan.recomputed is not None:
        _check_recomputed(plan, plan.recomputed)


def _check_ratios(ratios: Float64Array, num_micro_batches: int) -> None:
    if ratios.shape != (num_micro_batches,):
        raise PlanError(
            "shape", f"offload_ratios has {ratios.size} entries; expected {num_micro_batches}"
        )
    m = _first_where(len(ratios), lambda run: ~((ratios[run] >= 0) & (ratios[run] <= 1)))
    if m is not None:
        raise PlanError(
            "shape", f"offload ratio of micro-batch {m} is {ratios[m]}; expected 0 to 1"
        )


def _check_parts(num_parts: Int64Array, linear_tokens: float, num_micro_batches: int) -> None:
    if num_parts.shape != (num_micro_batches,):
        raise PlanError(
            "shape", f"num_parts has {num_parts.size} entries; expected {num_micro_batches}"
        )
    m = _first_where(len(num_parts), lambda run: num_parts[run] < 1)
    if m is not None:
        raise PlanError("shape", f"micro-batch {m} runs in {num_parts[m]} parts; expected >= 1")
    if not 0 <= linear_tokens < math.inf:
        raise PlanError("shape", f"linear_tokens is {linear_tokens}; expected at least 0")


def _check_streams(plan: FlatPlan, streams: BoolArray) -> None:
    if streams.shape != (plan.num_micro_batches,):
        raise PlanError(
            "shape", f"streams has {streams.size} entries; expected {plan.num_micro_batches}"
        )
    of_one = streams & (plan.parts_of_each == 1)
    if of_one.any():
        raise PlanError(
            "shape", f"micro-batch {_first(of_one)} streams in 1 part; expected at least 2"
        )
    ratios = plan.offload_ratios
    host_parts = ratios * plan.parts_of_each
    partly = streams & (np.abs(host_parts - np.round(host_parts)) > 1e-9 * plan.parts_of_each)
    if partly.any():
        m = _first(partly)
        raise PlanError(
            "shape",
            f"offload ratio of micro-batch {m}, a stream, is {ratios[m]}; expected a share of its "
            f"{plan.parts_of_each[m]} parts: those whose keys and values wait on the host",
        )


def _check_recomputed(plan: FlatPlan, recomputed: BoolArray) -> None:
    if recomputed.shape != (plan.num_micro_batches,):
        raise PlanError(
            "shape", f"recomputed has {recomputed.size} entries; expected {plan.num_micro_batches}"
        )
    if not 0 < plan.recomputed_share <= 1:
        raise PlanError(
            "shape", f"recomputed_share is {plan.recomputed_share}; expected above 0, at most 1"
        )
    twice = recomputed & (plan.is_stream | (plan.offload_ratios > 0))
    if twice.any():
        raise PlanError(
            "shape",
            f"micro-batch {_first(twice)} is recomputed, and a stream or offloaded; expected one "
            "of them",
        )


def _check_cover(plan: FlatPlan) -> None:
    if not _covers(plan):
        _refuse_cover(plan)


def _covers(plan: FlatPlan) -> bool:
    """Whether every sequence is there once: as many as there are, none missing."""
    missing = np.ones(len(plan.lengths), dtype=np.bool_)
    for ids in (plan.sequences, plan.local_sequences):
        if len(ids) and not 0 <= ids.min() <= ids.max() < len(missing):
            return False
        missing[ids] = False
    num_ids = len(plan.sequences) + len(plan.local_sequences)
    return num_ids == len(missing) and not missing.any()


def _refuse_cover(plan: FlatPlan) -> NoReturn:
    ids = np.concatenate([plan.sequences, plan.local_sequences])
    owners = np.concatenate([_owners(plan.sequence_offsets), _owners(plan.local_offsets)])
    outside = (ids < 0) | (ids >= len(plan.lengths))
    if outside.any():
        at = _first(outside)
        raise PlanError(
            "cover",
            f"micro-batch {owners[at]} holds sequence {ids[at]}; there are {len(plan.lengths)}",
        )
    counts = np.bincount(ids, minlength=len(plan.lengths))
    sequence = _first(counts != 1)
    holders = owners[ids == sequence].tolist()
    found = f"micro-batches {holders}" if holders else "no micro-batch"
    raise PlanError("cover", f"sequence {sequence} is in {found}; expected exactly one")


def _check_order(plan: FlatPlan) -> None:
    ranks = plan.ranks
    if len(ranks) and not 0 <= ranks.min() <= ranks.max() < plan.num_ranks:
        at = _first((ranks < 0) | (ranks >= plan.num_ranks))
        m = _owners(plan.rank_offsets)[at]
        raise PlanError(
            "order", f"micro-batch {m} names rank {ranks[at]}; there are {plan.num_ranks}"
        )
    for run in pieces(plan.rank_offsets, plan.local_offsets):
        _check_members(plan, run)


def _check_members(plan: FlatPlan, run: slice) -> None:
    """No rank is twice in a ring, and local sequences are on its members."""
    here, owner = _entries(plan.rank_offsets, run)
    members = owner * plan.num_ranks + plan.ranks[here]
    if len(members) > run.stop - run.start:  # else there is one in each
        members.sort()
    twice = np.diff(members) == 0
    if twice.any():
        m, rank = divmod(int(members[_first(twice)]), plan.num_ranks)
        raise PlanError("order", f"micro-batch {run.start + m} names rank {rank} twice")
    there, local_owner = _entries(plan.local_offsets, run)
    if not len(local_owner):
        return
    ranks = plan.local_ranks[there].astype(np.int64)
    stray = (ranks < 0) | (ranks >= plan.num_ranks)
    keys = local_owner * plan.num_ranks + ranks
    stray |= members.take(np.searchsorted(members, keys), mode="clip") != keys
    if stray.any():
        at = _first(stray)
        raise PlanError(
            "order",
            f"micro-batch {run.start + local_owner[at]} gives local sequence "
            f"{plan.local_sequences[there][at]} to rank {ranks[at]}, which is not in its ring",
        )


def _check_places(plan: FlatPlan, places: Int64Array) -> None:
    """The places that a plan gives its micro-batches ascend in the list of every rank."""
    if places.shape != (plan.num_micro_batches,):
        raise PlanError(
            "shape", f"positions has {places.size} entries; expected {plan.num_micro_batches}"
        )
    if (places < 0).any():
        m = _first(places < 0)
        raise PlanError("shape", f"position of micro-batch {m} is {places[m]}; expected 0 or more")
    by_rank = np.argsort(plan.ranks, kind="stable")
    owner = _owners(plan.rank_offsets)[by_rank]
    ranks, there = plan.ranks[by_rank], places[owner]
    falls = (np.diff(there) <= 0) & (np.diff(ranks) == 0)
    if falls.any():
        at = _first(falls)
        raise PlanError(
            "order",
            f"rank {ranks[at]} runs micro-batch {owner[at + 1]} at position {there[at + 1]}, after "
            f"micro-batch {owner[at]} at position {there[at]}; expected a later one",
        )


def _check_positions(plan: FlatPlan) -> None:
    """A micro-batch stands at one position in the lists of all ranks that share it."""
    by_rank = np.argsort(plan.ranks, kind="stable")
    counts = np.bincount(plan.ranks, minlength=plan.num_ranks)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    positions = np.empty(len(plan.ranks), dtype=np.int64)
    positions[by_rank] = np.arange(len(plan.ranks)) - first
    if plan.num_micro_batches == 0:
        return
    starts = plan.rank_offsets[:-1]
    differs = np.minimum.reduceat(positions, starts) != np.maximum.reduceat(positions, starts)
    if differs.any():
        m = _first(differs)
        span = slice(plan.rank_offsets[m], plan.rank_offsets[m + 1])
        found = dict(zip(plan.ranks[span].tolist(), positions[span].tolist(), strict=True))
        raise PlanError(
            "order",
            f"micro-batch {m} stands at different positions in its ranks' lists "
            f"(rank: position {found}); with pipeline stages they must be equal",
        )


def _check_fit(plan: FlatPlan, num_layers: int | None) -> None:
    m = _first_where(plan.num_micro_batches, lambda run: plan.offload_ratios[run] > 0)
    if m is not None and num_layers is None:
        raise PlanError(
            "fit",
            f"micro-batch {m} offloads activations: its resident share "
            "depends on the number of layers; pass num_layers",
        )
    for run in pieces(plan.rank_offsets, plan.sequence_offsets, plan.local_offsets):
        _check_capacity(plan, run, num_layers or 1)


def _check_capacity(plan: FlatPlan, run: slice, num_layers: int) -> None:
    """No rank holds more than its capacity in these micro-batches."""
    tokens, owner = tokens_per_member(plan, run)
    ratios = plan.offload_ratios[run]
    if plan.streams is not None:
        ratios = np.where(plan.streams[run], 0.0, ratios)  # of keys, not of a part's activations
    ratios = ratios[owner]
    kept = min(2, num_layers)
    resident = (kept + (1 - ratios) * (num_layers - kept)) / num_layers
    # a ratio is planned so that the share is exactly C: allow the rounding of one division
    limit = plan.tokens_per_rank * (1 + 1e-12)
    over = np.where(ratios > 0, tokens * resident > limit, tokens > plan.tokens_per_rank)
    if plan.recomputed is not None:
        twice = plan.recomputed[run][owner]
        resident = np.where(twice, plan.recomputed_share, resident)
        over = np.where(twice, tokens * resident > limit, over)
    if over.any():
        at = _first(over)
        is_share = ratios[at] > 0 or resident[at] < 1
        share = f" x {resident[at]:.4g} resident" if is_share else ""
        rank = plan.ranks[plan.rank_offsets[run.start] + at]
        raise PlanError(
            "fit",
            f"micro-batch {run.start + owner[at]} holds {tokens[at]:,} tokens{share} on rank "
            f"{rank}; the capacity is {plan.tokens_per_rank:,}",
        )


def tokens_per_member(plan: FlatPlan, run: slice) -> tuple[Int64Array, Int64Array]:
    """Padded tokens of each member of these micro-batches, and its micro-batch, from 0 on.

    Of a stream those of its fullest part.
    """
    degrees = counts_of(plan.rank_offsets, run)
    sharded, sharded_in = _entries(plan.sequence_offsets, run)
    slices = slice_tokens_array(
        plan.lengths[plan.sequences[sharded]], degrees[sharded_in], plan.slice_multiple
    )
    shared = np.zeros(len(degrees), dtype=np.int64)
    np.add.at(shared, sharded_in, slices)
    here, owner = _entries(plan.rank_offsets, run)
    tokens = shared[owner]
    there, local_owner = _entries(plan.local_offsets, run)
    whole_here = np.zeros_like(tokens)
    if len(local_owner):
        keys = owner * plan.num_ranks + plan.ranks[here]
        by_key = np.argsort(keys)
        local_keys = local_owner * plan.num_ranks + plan.local_ranks[there]
        lengths = plan.lengths[plan.local_sequences[there]]
        whole = slice_tokens_array(lengths, np.ones_like(lengths), plan.slice_multiple)
        np.add.at(whole_here, by_key[np.searchsorted(keys, local_keys, sorter=by_key)], whole)
    if plan.streams is None or not plan.streams[run].any():
        return tokens + whole_here, owner
    is_ring = degrees[owner] > 1
    parts = np.where(plan.streams[run], plan.parts_of_each[run], 1)[owner]
    of_ring, of_rank = np.where(is_ring, tokens, 0), whole_here + np.where(is_ring, 0, tokens)
    unit = plan.slice_multiple
    fullest = -(-(of_ring // (2 * unit)) // parts) * 2 * unit
    return fullest + -(-(of_rank // unit) // parts) * unit, owner


def _entries(offsets: Int64Array, run: slice) -> tuple[slice, Int64Array]:
    return span_of(offsets, run), owners_of(offsets, run)


def _owners(offsets: Int64Array) -> Int64Array:
    """The micro-batch of each entry of all of them."""
    return owners_of(offsets, slice(0, len(offsets) - 1))


def _first_where(size: int, mask_of: Callable[[slice], BoolArray]) -> int | None:
    """The first of so many entries for which the mask of its piece is true."""
    for begin in range(0, size, PIECE):
        mask = mask_of(slice(begin, min(begin + PIECE, size)))
        if mask.any():
            return begin + _first(mask)
    return None


def _first(mask: AnyArray) -> int:
    return int(np.argmax(mask))
