"""How long a plan of items takes, as ranks run it; nothing here knows how plans are made."""

from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import Float64Array
from megatron_hdp.media.cost import ItemCostModel
from megatron_hdp.media.items import ItemBatch, ItemPlan


@dataclass(frozen=True, kw_only=True)
class ItemFigures:
    """What a plan of items costs."""

    makespan_s: float
    """Until the last rank is done."""
    efficiency: float
    """Seconds of all items on one rank / sum of speeds / makespan; 1 without items."""
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

    All work over all speeds, and each item over as many ranks of a node as make it fastest.
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
    even = work_s(batch, cost).sum() / speeds.sum()
    return float(max(even, fastest.max() / speeds.max()))


def evaluate_items(batch: ItemBatch, plan: ItemPlan, cost: ItemCostModel) -> ItemFigures:
    """Return how long a plan takes.

    Args:
        batch: the items of a step.
        plan: of that batch; it is not checked (`ItemPlan.validate`).
        cost: of items.
    """
    speeds = batch.rank_speeds
    clock = np.zeros(batch.num_ranks)
    num_packs = 0
    for phase in np.unique(plan.phases):
        here = plan.phases == phase
        cut = np.flatnonzero(here & plan.is_cut)
        for item in cut[np.argsort(plan.turns[cut])].tolist():
            _run_cut(clock, item, batch, plan, cost)
            num_packs += int(plan.degrees[item])
        whole = np.flatnonzero(here & ~plan.is_cut)
        ranks = plan.first_ranks[whole]
        packs = np.unique(np.stack([ranks, plan.turns[whole]]), axis=1)
        work = np.bincount(ranks, weights=work_s(batch, cost)[whole], minlength=len(clock))
        calls = np.bincount(packs[0], minlength=len(clock)) * cost.pack_s
        clock += (work + calls) / speeds
        num_packs += packs.shape[1]
        clock[:] = clock.max(initial=0.0)  # the next phase begins together
    makespan_s = float(clock.max(initial=0.0))
    perfect_s = float(work_s(batch, cost).sum() / speeds.sum())
    return ItemFigures(
        makespan_s=makespan_s,
        efficiency=perfect_s / makespan_s if makespan_s else 1.0,
        bound_s=items_bound_s(batch, cost),
        num_cut=int(plan.is_cut.sum()),
        num_packs=num_packs,
        rows_to_other_nodes=_rows_to_other_nodes(batch, plan),
    )


def work_s(batch: ItemBatch, cost: ItemCostModel) -> Float64Array:
    """Return what each item takes on one rank of speed 1, ``[items]``."""
    n = batch.patches.astype(np.float64)
    return (cost.patch_s + cost.patch2_s * n) * n


def _run_cut(
    clock: Float64Array, item: int, batch: ItemBatch, plan: ItemPlan, cost: ItemCostModel
) -> None:
    """Advance the clocks of the ranks that encode one item: each layer waits for the slowest."""
    first, degree = int(plan.first_ranks[item]), int(plan.degrees[item])
    members = slice(first, first + degree)
    clock[members] = clock[members].max() + cut_item_s(item, batch, plan, cost)


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
