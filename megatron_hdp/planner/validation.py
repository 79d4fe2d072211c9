"""Checks a plan against its rules, whoever made it: shape, cover, fit, order."""

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planner.flat_plan import FlatPlan, PlanError, pieces
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
    if pipeline_stages > 1:
        _check_positions(plan)


def _check_shape(plan: FlatPlan) -> None:
    for name in ("num_ranks", "tokens_per_rank", "slice_multiple"):
        if getattr(plan, name) < 1:
            raise PlanError("shape", f"{name} is {getattr(plan, name)}; expected at least 1")
    if plan.lengths.ndim != 1 or (plan.lengths < 1).any():
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


def _check_offsets(name: str, offsets: NDArray[np.int64], end: int) -> None:
    if offsets.ndim != 1 or len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != end:
        found = f"{offsets[0]} to {offsets[-1]}" if offsets.size else "nothing"
        raise PlanError("shape", f"{name} runs from {found}; expected 0 to {end}")
    falls = np.diff(offsets) < 0
    if falls.any():
        raise PlanError("shape", f"{name} falls after entry {_first(falls)}")


def _check_micro_batches(plan: FlatPlan) -> None:
    empty = np.diff(plan.rank_offsets) == 0
    if empty.any():
        raise PlanError("shape", f"micro-batch {_first(empty)} has no ranks")
    empty = np.diff(plan.sequence_offsets) + np.diff(plan.local_offsets) == 0
    if empty.any():
        raise PlanError("shape", f"micro-batch {_first(empty)} has no sequences")
    falls = np.diff(plan.local_ranks) < 0
    borders = plan.local_offsets[(plan.local_offsets > 0) & (plan.local_offsets <= len(falls))]
    falls[borders - 1] = False
    if falls.any():
        m = _owners(plan.local_offsets)[_first(falls)]
        raise PlanError("shape", f"local_ranks of micro-batch {m} are not ascending")
    ratios = plan.offload_ratios
    if ratios.shape != (plan.num_micro_batches,):
        raise PlanError(
            "shape", f"offload_ratios has {ratios.size} entries; expected {plan.num_micro_batches}"
        )
    wrong = ~((ratios >= 0) & (ratios <= 1))
    if wrong.any():
        m = _first(wrong)
        raise PlanError(
            "shape", f"offload ratio of micro-batch {m} is {ratios[m]}; expected 0 to 1"
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
    outside = (plan.ranks < 0) | (plan.ranks >= plan.num_ranks)
    if outside.any():
        at = _first(outside)
        m = _owners(plan.rank_offsets)[at]
        raise PlanError(
            "order", f"micro-batch {m} names rank {plan.ranks[at]}; there are {plan.num_ranks}"
        )
    for run in pieces(plan.rank_offsets, plan.local_offsets):
        _check_members(plan, run)


def _check_members(plan: FlatPlan, run: slice) -> None:
    """No rank is twice in a ring, and local sequences are on its members."""
    here, owner = _entries(plan.rank_offsets, run)
    members = np.sort(owner * plan.num_ranks + plan.ranks[here])
    twice = np.diff(members) == 0
    if twice.any():
        m, rank = divmod(int(members[_first(twice)]), plan.num_ranks)
        raise PlanError("order", f"micro-batch {m} names rank {rank} twice")
    there, local_owner = _entries(plan.local_offsets, run)
    ranks = plan.local_ranks[there].astype(np.int64)
    stray = (ranks < 0) | (ranks >= plan.num_ranks)
    keys = local_owner * plan.num_ranks + ranks
    stray |= members.take(np.searchsorted(members, keys), mode="clip") != keys
    if stray.any():
        at = _first(stray)
        raise PlanError(
            "order",
            f"micro-batch {local_owner[at]} gives local sequence {plan.local_sequences[there][at]} "
            f"to rank {ranks[at]}, which is not in its ring",
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
    ratios = plan.offload_ratios
    resident = np.ones(plan.num_micro_batches)
    if (ratios > 0).any():
        if num_layers is None:
            raise PlanError(
                "fit",
                f"micro-batch {_first(ratios > 0)} offloads activations: its resident share "
                "depends on the number of layers; pass num_layers",
            )
        kept = min(2, num_layers)
        resident = (kept + (1 - ratios) * (num_layers - kept)) / num_layers
    for run in pieces(plan.rank_offsets, plan.sequence_offsets, plan.local_offsets):
        _check_capacity(plan, run, resident)


def _check_capacity(plan: FlatPlan, run: slice, resident: NDArray[np.float64]) -> None:
    """No rank holds more than its capacity in these micro-batches."""
    tokens, owner = _tokens_per_member(plan, run)
    ratios = plan.offload_ratios
    # a ratio is planned so that the share is exactly C: allow the rounding of one division
    limit = plan.tokens_per_rank * (1 + 1e-12)
    over = np.where(
        ratios[owner] > 0, tokens * resident[owner] > limit, tokens > plan.tokens_per_rank
    )
    if over.any():
        at = _first(over)
        m = owner[at]
        share = f" x {resident[m]:.4g} resident" if ratios[m] > 0 else ""
        rank = plan.ranks[plan.rank_offsets[run.start] + at]
        raise PlanError(
            "fit",
            f"micro-batch {m} holds {tokens[at]:,} tokens{share} on rank {rank}; "
            f"the capacity is {plan.tokens_per_rank:,}",
        )


def _tokens_per_member(plan: FlatPlan, run: slice) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Padded tokens of each member of these micro-batches, and the micro-batch it belongs to."""
    degrees = np.diff(plan.rank_offsets[run.start : run.stop + 1])
    sharded, sharded_in = _entries(plan.sequence_offsets, run)
    slices = slice_tokens_array(
        plan.lengths[plan.sequences[sharded]], degrees[sharded_in - run.start], plan.slice_multiple
    )
    shared = np.zeros(run.stop - run.start, dtype=np.int64)
    np.add.at(shared, sharded_in - run.start, slices)
    here, owner = _entries(plan.rank_offsets, run)
    tokens = shared[owner - run.start]
    keys = owner * plan.num_ranks + plan.ranks[here]
    by_key = np.argsort(keys)
    there, local_owner = _entries(plan.local_offsets, run)
    local_keys = local_owner * plan.num_ranks + plan.local_ranks[there]
    local_lengths = plan.lengths[plan.local_sequences[there]]
    whole = slice_tokens_array(local_lengths, np.ones_like(local_lengths), plan.slice_multiple)
    np.add.at(tokens, by_key[np.searchsorted(keys, local_keys, sorter=by_key)], whole)
    return tokens, owner


def _entries(offsets: NDArray[np.int64], run: slice) -> tuple[slice, NDArray[np.int64]]:
    """The entries that these micro-batches own, and the micro-batch of each."""
    counts = np.diff(offsets[run.start : run.stop + 1])
    owner = np.repeat(np.arange(run.start, run.stop), counts)
    return slice(int(offsets[run.start]), int(offsets[run.stop])), owner


def _owners(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The micro-batch of each entry."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def _first(mask: NDArray[Any]) -> int:
    return int(np.argmax(mask))
