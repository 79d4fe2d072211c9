"""When each rank encodes which item of a plan, for pictures of it."""

from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import Float64Array, Int32Array, Int64Array
from megatron_hdp.media.cost import ItemCostModel
from megatron_hdp.media.evaluation import cut_item_s, work_s
from megatron_hdp.media.items import ItemBatch, ItemPlan


@dataclass(frozen=True)
class ItemLanes:
    """A bar for each item on each rank that encodes it, ``[bars]``."""

    item: Int64Array
    rank: Int32Array
    start_s: Float64Array
    end_s: Float64Array

    @property
    def makespan_s(self) -> float:
        """Until the last rank is done."""
        return float(self.end_s.max(initial=0.0))


def item_lanes(batch: ItemBatch, plan: ItemPlan, cost: ItemCostModel) -> ItemLanes:
    """Lay out a plan: phase by phase cut items, then packs; an item of a pack has its share of it.

    Args:
        batch: the items of a step.
        plan: of that batch; it is not checked (`ItemPlan.validate`).
        cost: of items.
    """
    clock = np.zeros(batch.num_ranks)
    work, speeds = work_s(batch, cost), batch.rank_speeds
    bars: list[tuple[int, int, float, float]] = []
    order = np.lexsort((np.arange(len(plan.turns)), plan.turns, ~plan.is_cut, plan.phases))
    phase, packs = 0, set[tuple[int, int]]()
    for item in order.tolist():
        if int(plan.phases[item]) != phase:  # it begins together
            phase, packs = int(plan.phases[item]), set()
            clock[:] = clock.max()
        first, degree = int(plan.first_ranks[item]), int(plan.degrees[item])
        if degree > 1:
            members = slice(first, first + degree)
            begin, takes = float(clock[members].max()), cut_item_s(item, batch, plan, cost)
            clock[members] = begin + takes
            bars += [(item, rank, begin, begin + takes) for rank in range(first, first + degree)]
            continue
        begin = float(clock[first])
        if (pack := (first, int(plan.turns[item]))) not in packs:
            packs.add(pack)
            begin += cost.pack_s / float(speeds[first])
        clock[first] = begin + work[item] / speeds[first]
        bars.append((item, first, begin, float(clock[first])))
    columns = list(zip(*bars, strict=True)) or [(), (), (), ()]
    items, ranks, starts_s, ends_s = (np.array(one) for one in columns)
    return ItemLanes(
        items.astype(np.int64),
        ranks.astype(np.int32),
        starts_s.astype(np.float64),
        ends_s.astype(np.float64),
    )
