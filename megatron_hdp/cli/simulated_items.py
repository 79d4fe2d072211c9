"""What items add to the steps that ``simulate`` runs: who encodes them, and how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.cli.checking import encoder_of, job_of, planned_items
from megatron_hdp.data.mixture import Corpus, MediaSource, Step
from megatron_hdp.media import ITEM_STRATEGIES
from megatron_hdp.simulator.units import aligned, seconds

if TYPE_CHECKING:
    from megatron_hdp.megatron.options import TrainingArguments


@dataclass(frozen=True)
class Encoding:
    """Items of all steps under one way to say who encodes them; means over steps."""

    balance: str
    num_items: float
    num_rows: float
    step_s: float
    """Before the first micro-batch and behind the last."""
    efficiency: float
    """Work of all items / ranks / that of the busiest one."""


def patches_of(corpus: Corpus, step: Step) -> Int64Array:
    """Of each item of a step, ``[items]``; nothing is decoded."""
    columns = zip(step.sources.tolist(), step.rows.tolist(), step.lengths.tolist(), strict=True)
    found = [
        item.num_patches
        for number, row, length in columns
        if isinstance(source := corpus.sources[number], MediaSource)
        for _, item in source.items(row, length)
    ]
    return np.array(found, dtype=np.int64)


def encodings_of(
    options: TrainingArguments, num_gpus: int, steps: Sequence[Int64Array]
) -> list[Encoding]:
    """One for each way to say who encodes; none of a run without an encoder or items.

    Args:
        options: of the run.
        num_gpus: that it trains on.
        steps: patches of the items of each.
    """
    encoder = encoder_of(options)
    if encoder is None or not any(map(len, steps)):
        return []
    job, found = job_of(options, num_gpus), []
    for balance in ITEM_STRATEGIES:
        figures = [planned_items(job, encoder, one, balance)[2] for one in steps if len(one)]
        rows = sum(int(one.sum()) for one in steps) // encoder.patches_per_row
        encoding = Encoding(
            balance=balance,
            num_items=float(np.mean([len(one) for one in steps])),
            num_rows=rows / len(steps),
            step_s=sum(one.makespan_s for one in figures) / len(steps),
            efficiency=float(np.mean([one.efficiency for one in figures])),
        )
        found.append(encoding)
    return found


def text_of(encodings: Sequence[Encoding], names: str) -> str:
    """A line on the items, which have these names, and a table of who encodes them."""
    one = encodings[0]
    rows: list[tuple[str, ...]] = [(names, "encoding a step", "efficiency")]
    rows += [(each.balance, seconds(each.step_s), f"{each.efficiency:.3f}") for each in encodings]
    head = f"{one.num_items:,.0f} {names} a step of {one.num_rows:,.0f} rows, encoded besides:"
    return "\n".join([head, *aligned(rows)])
