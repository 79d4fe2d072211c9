"""A cell of the table: the same batches by every strategy, each plan executed event by event."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from bytescale.machine import Constants, Layout, setting_of
from bytescale.paper import BATCH_TOKENS, CONTEXTS, ROWS, Row
from bytescale.unsorted import naive_in_order

from megatron_hdp.arrays import Float64Array, Int64Array
from megatron_hdp.data.presets import LONGEST, preset_lengths
from megatron_hdp.planner import Plan, pipeline_lower_bound_s, tight_bound_s
from megatron_hdp.simulator.execution import Setting, StepExecution

IN_ORDER = "naive_in_order"
"""Naive HDP of sequences as they come."""
STRATEGIES = ("naive", IN_ORDER, "bytescale", "auto")
"""Beside the static mesh; only ours, ``auto``, may offload."""
SEEDS = 3
BATCHES = 8
"""Steps of a seed."""


@dataclass(frozen=True)
class Cell:
    """A row at one context."""

    row: Row
    column: int

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        return CONTEXTS[self.column]

    @property
    def name(self) -> str:
        """As in ``llama-7b github 256K``."""
        return f"{self.row.name} {self.context // 1024}K"

    @property
    def paper_naive(self) -> float:
        """Speed-up of naive HDP in the paper."""
        return self.row.naive[self.column]

    @property
    def paper_balanced(self) -> float:
        """Speed-up of balanced HDP in the paper."""
        return self.row.balanced[self.column]


def all_cells() -> Iterator[Cell]:
    """Rows and columns as the paper has them."""
    for row in ROWS:
        for column in range(len(CONTEXTS)):
            yield Cell(row, column)


@cache
def documents(data: str, seed: int, step: int) -> Int64Array:
    """Lengths of a batch before it is brought to a context."""
    return preset_lengths(
        data, num_tokens=BATCH_TOKENS, max_length=LONGEST, seed=BATCHES * seed + step
    )


def split_at(lengths: Int64Array, context: int) -> Int64Array:
    """Longer documents in pieces of the context, the last one what is left."""
    whole, rest = np.divmod(lengths, context)
    counts = whole + (rest > 0)
    pieces = np.full(int(counts.sum()), context, dtype=np.int64)
    has_rest = rest > 0
    pieces[(np.cumsum(counts) - 1)[has_rest]] = rest[has_rest]
    return pieces


def execution_of(setting: Setting, lengths: Int64Array, strategy: str) -> StepExecution:
    """Plan a batch and run the plan."""
    setting = replace(setting, offload="auto" if strategy == "auto" else "off")
    return setting.executed(planned(setting, lengths, strategy))


def planned(setting: Setting, lengths: Int64Array, strategy: str) -> Plan:
    """The plan of one of ``STRATEGIES`` or of the planner's."""
    if strategy == IN_ORDER:
        by_length = setting.planned(lengths, "naive") if setting.offload == "auto" else None
        return naive_in_order(lengths, setting.ranks, setting.tokens_per_rank, by_length)
    return setting.planned(lengths, strategy)


def step_times_s(
    cell: Cell,
    constants: Constants,
    strategies: Sequence[str],
    *,
    seeds: int = SEEDS,
    batches: int = BATCHES,
    layout: Layout | None = None,
) -> dict[str, Float64Array]:
    """Seconds of every step by strategy, ``[seeds, batches]``."""
    setting = setting_of(cell.row, cell.context, constants, layout)
    times = {strategy: np.empty((seeds, batches)) for strategy in strategies}
    for seed in range(seeds):
        for step in range(batches):
            lengths = split_at(documents(cell.row.data, seed, step), cell.context)
            for strategy, found in times.items():
                found[seed, step] = execution_of(setting, lengths, strategy).step_s
    return times


def figures_of(
    cell: Cell, constants: Constants, sequence_parts: int = 1, virtual_stages: int = 1
) -> dict[str, Any]:
    """The cell's entry of the JSON: speed-ups over the static mesh, by the time of all steps.

    A spread is the least and greatest of the seeds. ``bound`` is what no plan exceeds. With stages
    and ``sequence_parts`` above 1 there is ours in parts, too, and with ``virtual_stages`` above 1
    that in so many chunks a stage, and the static mesh in as many, over the one in one chunk.
    """
    setting = setting_of(cell.row, cell.context, constants)
    times = step_times_s(cell, constants, ("static", *STRATEGIES))
    static = times["static"]
    found: dict[str, Any] = {
        "model": cell.row.model,
        "data": cell.row.data,
        "context": cell.context,
        "gpus": cell.row.gpus,
        "ranks": setting.ranks,
        "tensor_ranks": cell.row.gpus // setting.ranks // setting.pipeline.stages,
        "stages": setting.pipeline.stages,
        "paper_naive": cell.paper_naive,
        "paper_balanced": cell.paper_balanced,
        "static_s": round(float(static.mean()), 2),
    }
    for strategy in STRATEGIES:
        mine = times[strategy]
        of_seeds = (static.sum(axis=1) / mine.sum(axis=1)).round(2).tolist()
        found[strategy] = round(float(static.sum() / mine.sum()), 3)
        found[f"{strategy}_spread"] = [min(of_seeds), max(of_seeds)]
    found["bound"] = round(float(static.sum() / bound_s(cell, setting)), 3)
    if sequence_parts > 1 and setting.pipeline.stages > 1:
        parted = replace(setting, sequence_parts=sequence_parts)
        batches = [
            split_at(documents(cell.row.data, seed, step), cell.context)
            for seed in range(SEEDS)
            for step in range(BATCHES)
        ]

        def over_static(one: Setting, strategy: str) -> float:
            mine_s = sum(execution_of(one, lengths, strategy).step_s for lengths in batches)
            return round(float(static.sum() / mine_s), 3)

        found["in_parts"] = over_static(parted, "auto")
        found["bound_in_parts"] = round(float(static.sum() / bound_s(cell, parted)), 3)
        if virtual_stages > 1:
            chunks = replace(parted.pipeline, chunks=virtual_stages)
            in_chunks = replace(parted, pipeline=chunks)
            found["in_parts_and_chunks"] = over_static(in_chunks, "auto")
            found["static_in_chunks"] = over_static(in_chunks, "static")
    return found


def bound_s(cell: Cell, setting: Setting) -> float:
    """Seconds of all batches at the tightest bound that is proven for each, with gradient sync."""
    cost, ranks, stages = setting.cost_model, setting.ranks, setting.pipeline.stages
    machine, total = setting.machine, 0.0
    after = machine.optimizer_s + max(
        machine.reduction_s(stage, ranks) + machine.gather_s(stage, ranks)
        for stage in range(stages)
    )
    most_tokens = setting.tokens_per_rank * cost.num_layers // 2  # two layers always stay
    for seed in range(SEEDS):
        for step in range(BATCHES):
            lengths = split_at(documents(cell.row.data, seed, step), cell.context)
            if stages > 1:
                total += pipeline_lower_bound_s(
                    *(lengths, ranks, cost, setting.pipeline, most_tokens),
                    most_parts=setting.sequence_parts,
                )
            else:
                total += tight_bound_s(
                    lengths,
                    ranks=ranks,
                    tokens_per_rank=setting.tokens_per_rank,
                    max_length=cell.context,
                    cost_model=cost,
                    offload="auto",
                )
            total += after
    return total
