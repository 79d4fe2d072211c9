"""``megatron-hdp plan --items``: which ranks encode which images and videos of a step."""

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hdp.cli.shared.item_sizes import Sizes, read_sizes
from megatron_hdp.cli.shared.numbers import read_speeds
from megatron_hdp.cli.shared.outputs import write_json
from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.media import (
    ENCODERS,
    ITEM_STRATEGIES,
    ItemBatch,
    ItemCostModel,
    ItemFigures,
    ItemPlan,
    dealt,
    evaluate_items,
    plan_items,
)
from megatron_hdp.simulator.units import aligned, seconds

_COLUMNS = (
    *("strategy", "efficiency", "bound/makespan", "makespan", "cut items", "packs"),
    *("rows to other nodes", "planning"),
)


@dataclass(frozen=True)
class _Outcome:
    plan: ItemPlan
    figures: ItemFigures
    planning_s: float


def run(arguments: argparse.Namespace) -> int:
    """Plans the items of a file, prints how good the plan is, and writes it."""
    encoder = ENCODERS[arguments.encoder]
    sizes = read_sizes(arguments.items, encoder.resizing)
    consumers, micro_batches = dealt(sizes.patches, arguments.ranks, arguments.micro_batches)
    speeds = None
    if arguments.rank_speeds is not None:
        speeds = np.array(read_speeds(arguments.rank_speeds, arguments.ranks))
    batch = ItemBatch(
        patches=sizes.patches,
        consumers=consumers,
        micro_batches=micro_batches,
        num_ranks=arguments.ranks,
        ranks_per_node=arguments.ranks_per_node or 8,
        patches_per_row=encoder.patches_per_row,
        patches_per_pack=arguments.patches_per_pack,
        speeds=speeds,
    )
    cost = ItemCostModel.from_encoder(encoder)

    def outcome(strategy: str) -> _Outcome:
        begin = time.perf_counter()
        plan = plan_items(batch, cost, strategy, replica_ranks=arguments.replica_ranks)
        planning_s = time.perf_counter() - begin
        plan.validate(batch, packs_have_room=strategy == "step")
        return _Outcome(plan, evaluate_items(batch, plan, cost), planning_s)

    chosen = outcome(arguments.media_balance)
    print(_batch_line(sizes, batch))
    outcomes = [chosen]
    if arguments.compare:
        others = [one for one in ITEM_STRATEGIES if one != chosen.plan.strategy]
        found = {one: outcome(one) for one in others} | {chosen.plan.strategy: chosen}
        outcomes = [found[one] for one in ITEM_STRATEGIES]
        print(_table(outcomes))
    else:
        print(_summary(chosen, arguments.encoder))
    if arguments.output:
        _write(arguments.output, chosen.plan, batch)
    if arguments.plot:
        from megatron_hdp.simulator.plot_items import plot_items

        plot_items(batch, {_title(one): one.plan for one in outcomes}, cost, arguments.plot)
        print(f"picture written to {arguments.plot}")
    return ExitCode.DONE


def _batch_line(sizes: Sizes, batch: ItemBatch) -> str:
    n = sizes.patches
    return (
        f"{sizes.counts}: {len(n):,} items, "
        f"{n.sum():,} patches (median {int(np.median(n)):,}, largest {n.max():,}), "
        f"{n.sum() // batch.patches_per_row:,} rows on {batch.num_ranks:,} ranks"
    )


def _summary(made: _Outcome, name: str) -> str:
    figures = made.figures
    rows = [
        ("strategy", made.plan.strategy),
        ("encoder", f"{name}, trained, by its shape at 400 TFLOP/s"),
        ("efficiency", f"{figures.efficiency:.3f}  (all items / sum of speeds / makespan)"),
        (
            "bound/makespan",
            f"{_share(figures):.3f}  (no plan takes less than {seconds(figures.bound_s)})",
        ),
        ("makespan", seconds(figures.makespan_s)),
        ("cut items", f"{figures.num_cut:,}  ({_degrees(made.plan)})"),
        ("packs", f"{figures.num_packs:,}"),
        ("rows to other nodes", f"{figures.rows_to_other_nodes:,}"),
        ("planning", f"{1e3 * made.planning_s:.2f} ms"),
    ]
    return "\n".join(f"  {name:<20} {value}" for name, value in rows)


def _title(made: _Outcome) -> str:
    figures = made.figures
    return (
        f"{made.plan.strategy}: efficiency {figures.efficiency:.3f}, {seconds(figures.makespan_s)}"
    )


def _degrees(plan: ItemPlan) -> str:
    degrees, counts = np.unique(plan.degrees, return_counts=True)
    pairs = zip(degrees.tolist(), counts.tolist(), strict=True)
    return ", ".join(f"{count:,} on {degree}" for degree, count in pairs)


def _table(outcomes: Sequence[_Outcome]) -> str:
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for one in outcomes:
        figures = one.figures
        rows.append(
            (
                one.plan.strategy,
                f"{figures.efficiency:.3f}",
                f"{_share(figures):.3f}",
                seconds(figures.makespan_s),
                f"{figures.num_cut:,}",
                f"{figures.num_packs:,}",
                f"{figures.rows_to_other_nodes:,}",
                f"{1e3 * one.planning_s:.2f} ms",
            )
        )
    return "\n".join(aligned(rows))


def _share(figures: ItemFigures) -> float:
    return figures.bound_s / figures.makespan_s if figures.makespan_s else math.nan


def _write(path: str, plan: ItemPlan, batch: ItemBatch) -> None:
    fields = {
        "strategy": plan.strategy,
        "num_ranks": batch.num_ranks,
        "ranks_per_node": batch.ranks_per_node,
        "patches_per_row": batch.patches_per_row,
        "patches": batch.patches.tolist(),
        "consumers": batch.consumers.tolist(),
        "first_ranks": plan.first_ranks.tolist(),
        "degrees": plan.degrees.tolist(),
        "turns": plan.turns.tolist(),
        "phases": plan.phases.tolist(),
    }
    write_json(path, fields)
