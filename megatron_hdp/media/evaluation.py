"""How long a plan of items takes, as ranks run it; nothing here knows how plans are made."""

from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import BoolArray, Float64Array
from megatron_hdp.media.cost import ItemCostModel
from megatron_hdp.media.gaps import PipelineGaps
from megatron_hdp.media.items import ItemBatch, ItemPlan


@dataclass(frozen=True, kw_only=True)
class ItemFigures:
    """What a plan of items costs."""

    makespan_s: float
    """Until the last rank is done; with gaps what the step takes more than without, at most."""
    efficiency: float
    """Seconds of all items on one rank / sum of speeds / those of the rank that is done last;
    1 without items."""
    bound_s: float
    """No plan takes less."""
    num_cut: int
    """Items that several ranks encode together."""
    num_packs: int
    """Calls of the encoder, all ranks."""
    rows_to_other_nodes: int
    """Rows whose consumer is in another node than the rank that makes them."""


def items_bound_s(batch: ItemBatch, cost: ItemCostModel) -> float:
    """Return what no plan takes less than.

    All work over all speeds, and each item over as many ranks of a node as make it fastest; with
    gaps what these do not hold of all work.
    """
    speeds = batch.rank_speeds
    if not len(batch.patches):
        return 0.0
    n = np.unique(batch.patches)
    rows = n // batch.patches_per_row
    fastest = np.full(len(n), np.inf)
    most = min(batch.ranks_per_node, batch.num_ranks, batch.most_ranks)
    for degree in range(1, most + 1):
        piece = -(-rows // degree) * batch.patches_per_row
        attention = cost.patch2_s * n * piece
        hidden = attention * (degree - 1) / degree
        waits = np.maximum(cost.gathered_s_per_patch * (n - piece) - hidden, 0.0)
        takes = cost.patch_s * piece + attention + waits
        fastest = np.minimum(fastest, np.where(degree <= rows, takes, np.inf))
    if batch.gaps is not None:
        return _beyond_gaps_s(batch, batch.gaps, cost)
    even = work_s(batch, cost).sum() / speeds.sum()
    return float(max(even, fastest.max() / speeds.max()))


def _beyond_gaps_s(batch: ItemBatch, gaps: PipelineGaps, cost: ItemCostModel) -> float:
    """Return what a step must become longer until its gaps hold all work."""
    work, share = work_s(batch, cost).sum(), cost.forward_share
    before_s, behind_s = gaps.free_until_s, gaps.makespan_s - gaps.free_from_s

    def held(more_s: float) -> float:
        of_rows = (before_s + more_s) / share
        if share == 1:
            return float((batch.rank_speeds * of_rows).sum())
        of_gradients = (behind_s + more_s) / (1 - share)
        return float((batch.rank_speeds * np.minimum(of_rows, of_gradients)).sum())

    too_short, enough = 0.0, work / batch.rank_speeds.sum()
    if held(0.0) >= work:
        return 0.0
    for _ in range(50):
        middle = (too_short + enough) / 2
        too_short, enough = (too_short, middle) if held(middle) >= work else (middle, enough)
    return too_short


def evaluate_items(batch: ItemBatch, plan: ItemPlan, cost: ItemCostModel) -> ItemFigures:
    """Return how long a plan takes.

    Args:
        batch: the items of a step.
        plan: of that batch; it is not checked (`ItemPlan.validate`).
        cost: of items.
    """
    clock, phases = np.zeros(batch.num_ranks), np.unique(plan.phases)
    for phase in phases:
        run_phase(clock, batch, plan, cost, phase)
        if plan.strategy == "micro-batch":
            clock[:] = clock.max(initial=0.0)  # the next phase begins together
    last_s = makespan_s = float(clock.max(initial=0.0))
    if batch.gaps is not None:
        makespan_s = _late_s(batch, batch.gaps, plan, cost)
    perfect_s = float(work_s(batch, cost).sum() / batch.rank_speeds.sum())
    packs = np.stack([plan.phases, plan.first_ranks, plan.turns])[:, ~plan.is_cut]
    return ItemFigures(
        makespan_s=makespan_s,
        efficiency=perfect_s / last_s if last_s else 1.0,
        bound_s=items_bound_s(batch, cost),
        num_cut=int(plan.is_cut.sum()),
        num_packs=np.unique(packs, axis=1).shape[1] + int(plan.degrees[plan.is_cut].sum()),
        rows_to_other_nodes=_rows_to_other_nodes(batch, plan),
    )


def _late_s(batch: ItemBatch, gaps: PipelineGaps, plan: ItemPlan, cost: ItemCostModel) -> float:
    """Return how much later than without items a step ends, at most.

    If no rank begins later than by d, and no wave's rows come later than by d, all that the
    schedule runs is late by d or less.
    """
    assert batch.waves is not None, "gaps are those of waves"
    rows_s, late_s = np.zeros(batch.num_ranks), 0.0
    gradients_s = gaps.free_from_s.copy()
    for phase in np.unique(plan.phases):
        wave = batch.waves[plan.phases == phase][0]
        run_phase(rows_s, batch, plan, cost, phase, cost.forward_share)
        late_s = max(late_s, float(rows_s.max() - gaps.wanted_s[wave]))
        if cost.forward_share < 1:
            np.maximum(gradients_s, gaps.given_s[wave], out=gradients_s)
            run_phase(gradients_s, batch, plan, cost, phase, 1 - cost.forward_share)
    late_s = max(late_s, float((rows_s - gaps.free_until_s).max()))
    return late_s + max(float(gradients_s.max()) - gaps.makespan_s, 0.0)


def run_phase(
    clock: Float64Array,
    batch: ItemBatch,
    plan: ItemPlan,
    cost: ItemCostModel,
    phase: int,
    share: float = 1.0,
) -> None:
    """Advance the clocks of all ranks, ``[ranks]``, over the items of a phase.

    Args:
        clock: when each rank begins, and then when it has ended.
        batch: the items of a step.
        plan: of that batch.
        cost: of items.
        phase: of the plan.
        share: of the cost, that of the passes which run.
    """
    here = plan.phases == phase
    cut = np.flatnonzero(here & plan.is_cut)
    for item in cut[np.argsort(plan.turns[cut])].tolist():
        first, degree = int(plan.first_ranks[item]), int(plan.degrees[item])
        members = slice(first, first + degree)  # each layer waits for the slowest
        clock[members] = clock[members].max() + share * cut_item_s(item, batch, plan, cost)
    whole = here & ~plan.is_cut
    clock += share * _packs_s(batch, plan, cost, whole)


def rank_work_s(batch: ItemBatch, plan: ItemPlan, cost: ItemCostModel) -> Float64Array:
    """Return what each rank's packs and pieces take it, without waiting for others, ``[ranks]``.

    Args:
        batch: the items of a phase.
        plan: of that batch.
        cost: of items.
    """
    found = _packs_s(batch, plan, cost, ~plan.is_cut)
    for item in np.flatnonzero(plan.is_cut).tolist():
        first = int(plan.first_ranks[item])
        members = slice(first, first + int(plan.degrees[item]))
        found[members] += cut_item_s(item, batch, plan, cost)
    return found


def _packs_s(
    batch: ItemBatch, plan: ItemPlan, cost: ItemCostModel, whole: BoolArray
) -> Float64Array:
    """Return what each rank's packs of these items, of one phase, take, ``[ranks]``."""
    ranks, num_ranks = plan.first_ranks[whole], batch.num_ranks
    packs = np.unique(np.stack([ranks, plan.turns[whole]]), axis=1)
    work = np.bincount(ranks, weights=work_s(batch, cost)[whole], minlength=num_ranks)
    calls = np.bincount(packs[0], minlength=num_ranks) * cost.pack_s
    seconds: Float64Array = (work + calls) / batch.rank_speeds
    return seconds


def work_s(batch: ItemBatch, cost: ItemCostModel) -> Float64Array:
    """Return what each item takes on one rank of speed 1, ``[items]``."""
    n = batch.patches.astype(np.float64)
    return (cost.patch_s + cost.patch2_s * n) * n


def cut_item_s(item: int, batch: ItemBatch, plan: ItemPlan, cost: ItemCostModel) -> float:
    """Return what an item takes that several ranks encode together."""
    first, degree = int(plan.first_ranks[item]), int(plan.degrees[item])
    members = slice(first, first + degree)
    n, pieces = int(batch.patches[item]), batch.pieces(item, degree)
    attention = cost.patch2_s * n * pieces
    hidden = attention * (degree - 1) / degree
    waits = np.maximum(cost.gathered_s_per_patch * (n - pieces) - hidden, 0.0)
    takes = (cost.patch_s * pieces + attention + cost.pack_s + waits) / batch.rank_speeds[members]
    return float(takes.max())


def _rows_to_other_nodes(batch: ItemBatch, plan: ItemPlan) -> int:
    """A cut item is within a node, so its first rank tells."""
    leaves = batch.nodes(plan.first_ranks) != batch.nodes(batch.consumers)
    return int(batch.patches[leaves].sum()) // batch.patches_per_row
