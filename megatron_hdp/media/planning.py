"""Plans which ranks encode which items of a step: ours, and what others do.

- ``home``: each item where its rows are, as a model does that has its encoder in its first stage.
- ``replica``: over the ranks of one replica, by rows, longest first (``mdp`` of NVIDIA's forks).
- ``micro-batch``: each micro-batch's items over all ranks, by their square (VeOmni).
- ``step``: a step's items over all ranks, by their cost, large ones cut.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from megatron_hdp.arrays import Float64Array, Int32Array, Int64Array
from megatron_hdp.media.cost import ItemCostModel
from megatron_hdp.media.evaluation import evaluate_items, rank_work_s
from megatron_hdp.media.extension import _items
from megatron_hdp.media.gaps import PipelineGaps
from megatron_hdp.media.items import ItemBatch, ItemPlan, ItemPlanError
from megatron_hdp.media.lateness import Lateness
from megatron_hdp.options import BALANCES as ITEM_STRATEGIES


def plan_items(
    batch: ItemBatch, cost: ItemCostModel, strategy: str = "step", *, replica_ranks: int = 8
) -> ItemPlan:
    """Return a plan; the same for the same arguments.

    Args:
        batch: the items of a step.
        cost: of items.
        strategy: one of `ITEM_STRATEGIES`.
        replica_ranks: neighbouring ranks that ``replica`` balances among themselves.

    Raises:
        ItemPlanError: figures that are none, or an item that no node can hold.
    """
    if strategy not in ITEM_STRATEGIES:
        raise ItemPlanError(
            f"a strategy of items: found {strategy!r}, expected one of {', '.join(ITEM_STRATEGIES)}"
        )
    try:
        if batch.waves is not None and strategy != "micro-batch":
            return _by_waves(batch, batch.waves, cost, strategy, replica_ranks)
        if strategy == "step":
            return _step(batch, cost)
        return _OTHERS[strategy](batch, replica_ranks)
    except ItemPlanError:
        raise
    except ValueError as error:
        raise ItemPlanError(f"a plan of items: {error}") from None


def plan_in_gaps(
    batch: ItemBatch,
    cost: ItemCostModel,
    choices: Sequence[tuple[Int32Array, PipelineGaps]],
    strategy: str = "step",
    *,
    replica_ranks: int = 8,
) -> tuple[ItemBatch, ItemPlan]:
    """Return the plan, and its batch with waves, that makes a step of pipelines least longer.

    Args:
        batch: the items of a step.
        cost: of items.
        choices: waves of the items, and the gaps that belong to them.
        strategy: one of `ITEM_STRATEGIES`.
        replica_ranks: as of `plan_items`.

    Raises:
        ItemPlanError: as `plan_items`.
    """
    found: list[tuple[float, ItemBatch, ItemPlan]] = []
    for waves, gaps in choices:
        one = replace(batch, waves=waves, gaps=gaps)
        made = plan_items(one, cost, strategy, replica_ranks=replica_ranks)
        found.append((evaluate_items(one, made, cost).makespan_s, one, made))
    _, in_waves, best = min(found, key=lambda one: one[0])
    return in_waves, best


def _by_waves(
    batch: ItemBatch, waves: Int32Array, cost: ItemCostModel, strategy: str, replica_ranks: int
) -> ItemPlan:
    """Return the plans of all waves, each a phase of one."""
    gaps = batch.gaps if strategy == "step" else None
    if gaps is None:
        return _one_by_one(
            batch,
            waves,
            strategy,
            lambda of_wave, _: plan_items(of_wave, cost, strategy, replica_ranks=replica_ranks),
        )
    found = []
    for is_even in (True, False):
        late = Lateness(batch, gaps, cost, is_even=is_even)
        made = _one_by_one(batch, waves, strategy, partial(_in_gaps, late, cost))
        found.append((late.late_s, made))
    return min(found, key=lambda one: one[0])[1]


def _in_gaps(late: Lateness, cost: ItemCostModel, batch: ItemBatch, wave: int) -> ItemPlan:
    made = _step(batch, cost, *late.busy_s(wave))
    late.add(wave, rank_work_s(batch, made, cost))
    return made


def _one_by_one(
    batch: ItemBatch,
    waves: Int32Array,
    strategy: str,
    plan: Callable[[ItemBatch, int], ItemPlan],
) -> ItemPlan:
    """Return what `plan` makes of the items of each wave, as one."""
    first_ranks, turns = np.zeros_like(waves), np.zeros_like(waves)
    degrees = np.ones_like(waves)
    num_cut = 0
    for wave in np.unique(waves).tolist():
        here = np.flatnonzero(waves == wave)
        made = plan(batch.of_wave(here), wave)
        first_ranks[here], degrees[here] = made.first_ranks, made.degrees
        turns[here] = made.turns + num_cut * made.is_cut  # cut items have turns of their own
        num_cut += int(made.is_cut.sum())
    return ItemPlan(
        strategy=strategy, first_ranks=first_ranks, degrees=degrees, turns=turns, phases=waves
    )


def _step(
    batch: ItemBatch,
    cost: ItemCostModel,
    busy_s: Float64Array | None = None,
    free_s: float = 0.0,
) -> ItemPlan:
    first_ranks, degrees, turns = _items.plan_items(
        batch.patches,
        batch.consumers,
        batch.rank_speeds,
        np.zeros(0) if busy_s is None else busy_s,
        free_s,
        ranks_per_node=batch.ranks_per_node,
        most_ranks=batch.most_ranks,
        patches_per_row=batch.patches_per_row,
        patches_per_pack=batch.patches_per_pack,
        patch_s=cost.patch_s,
        patch2_s=cost.patch2_s,
        pack_s=cost.pack_s,
        gathered_s_per_patch=cost.gathered_s_per_patch,
    )
    return ItemPlan(
        strategy="step",
        first_ranks=first_ranks,
        degrees=degrees,
        turns=turns,
        phases=np.zeros_like(turns),
    )


def _home(batch: ItemBatch, replica_ranks: int) -> ItemPlan:
    del replica_ranks
    return _of_whole("home", batch, batch.consumers, _no_phase(batch))


def _replica(batch: ItemBatch, replica_ranks: int) -> ItemPlan:
    ranks = np.empty_like(batch.consumers)
    replicas = batch.consumers // replica_ranks
    for replica in np.unique(replicas):
        first = int(replica) * replica_ranks
        mine = np.flatnonzero(replicas == replica)
        members = min(replica_ranks, batch.num_ranks - first)
        ranks[mine] = first + _longest_first(batch.patches[mine].astype(float), members)
    return _of_whole("replica", batch, ranks, _no_phase(batch))


def _micro_batch(batch: ItemBatch, replica_ranks: int) -> ItemPlan:
    del replica_ranks
    ranks = np.empty_like(batch.consumers)
    for number in np.unique(batch.micro_batches):
        mine = np.flatnonzero(batch.micro_batches == number)
        ranks[mine] = _longest_first(batch.patches[mine].astype(float) ** 2, batch.num_ranks)
    return _of_whole("micro-batch", batch, ranks, batch.micro_batches)


_OTHERS: dict[str, Callable[[ItemBatch, int], ItemPlan]] = {
    "home": _home,
    "replica": _replica,
    "micro-batch": _micro_batch,
}


def _no_phase(batch: ItemBatch) -> Int32Array:
    return np.zeros(len(batch.patches), dtype=np.int32)


def _longest_first(weights: Float64Array, num_ranks: int) -> Int32Array:
    """Return each item's rank: the heaviest first, to the rank that has least."""
    ranks = np.empty(len(weights), dtype=np.int32)
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for item in np.argsort(-weights, kind="stable").tolist():
        load, rank = loads[0]
        ranks[item] = rank
        heapq.heapreplace(loads, (load + float(weights[item]), rank))
    return ranks


def _of_whole(strategy: str, batch: ItemBatch, ranks: Int32Array, phases: Int32Array) -> ItemPlan:
    """Return the plan of items that nobody cuts; packs are filled in the order of the step."""
    turns = np.zeros(len(ranks), dtype=np.int32)
    filled: dict[tuple[int, int], tuple[int, int]] = {}
    places = zip(phases.tolist(), ranks.tolist(), batch.patches.tolist(), strict=True)
    for item, (phase, rank, patches) in enumerate(places):
        pack, held = filled.get((phase, rank), (0, 0))
        if held and held + patches > batch.patches_per_pack:
            pack, held = pack + 1, 0
        turns[item] = pack
        filled[phase, rank] = pack, held + patches
    ones = np.ones(len(ranks), dtype=np.int32)
    return ItemPlan(strategy=strategy, first_ranks=ranks, degrees=ones, turns=turns, phases=phases)


def dealt(
    patches: Int64Array, num_ranks: int, num_micro_batches: int
) -> tuple[Int32Array, Int32Array]:
    """Return consumers and micro-batches of items that come in the order of a step's sequences.

    Each micro-batch has as many patches, and in it each rank.

    Args:
        patches: of each item, ``[items]``.
        num_ranks: that hold sequences.
        num_micro_batches: of each.
    """
    middles = np.cumsum(patches) - patches / 2
    places = middles / max(int(patches.sum()), 1) * num_micro_batches
    micro_batches = np.minimum(places.astype(np.int32), num_micro_batches - 1)
    within = ((places - micro_batches) * num_ranks).astype(np.int32)
    return np.minimum(within, num_ranks - 1), micro_batches
