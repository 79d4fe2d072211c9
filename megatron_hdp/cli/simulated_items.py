"""What items add to the steps that ``simulate`` runs: who encodes them, and how long."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.cli.checking import (
    encoder_of,
    encodes_in_gaps,
    gap_figures,
    job_of,
    planned_items,
)
from megatron_hdp.data.mixture import Corpus, MediaSource, Step
from megatron_hdp.media import ITEM_STRATEGIES
from megatron_hdp.planner import Plan
from megatron_hdp.simulator.execution import Setting
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
    """Seconds that a step takes more, at most."""
    outside_s: float
    """The same, were all encoded before its first micro-batch and behind the last."""
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
    options: "TrainingArguments",
    setting: Setting,
    steps: Sequence[Int64Array],
    batches: Sequence[Int64Array],
) -> list[Encoding]:
    """One for each way to say who encodes; none of a run without an encoder or items.

    Args:
        options: of the run.
        setting: of the run.
        steps: patches of the items of each.
        batches: lengths of the sequences of each.
    """
    encoder = encoder_of(options)
    if encoder is None or not any(map(len, steps)):
        return []
    job, found = job_of(options, setting.num_gpus), []
    plans: list[Plan | None] = [None] * len(steps)
    if encodes_in_gaps(options, job):
        plans = [_planned(setting, lengths, options.hdp_strategy) for lengths in batches]
    for balance in ITEM_STRATEGIES:
        outside, beside = [], []
        for patches, made in zip(steps, plans, strict=True):
            if not len(patches):
                continue
            alone = planned_items(job, encoder, patches, balance)[2]
            outside.append(alone)
            beside.append(
                alone
                if made is None
                else gap_figures(job, encoder, patches, balance, made, setting)
            )
        rows = sum(int(one.sum()) for one in steps) // encoder.patches_per_row
        encoding = Encoding(
            balance=balance,
            num_items=float(np.mean([len(one) for one in steps])),
            num_rows=rows / len(steps),
            step_s=sum(one.makespan_s for one in beside) / len(steps),
            outside_s=sum(one.makespan_s for one in outside) / len(steps),
            efficiency=float(np.mean([one.efficiency for one in beside])),
        )
        found.append(encoding)
    return found


def _planned(setting: Setting, lengths: Int64Array, strategy: str) -> Plan | None:
    """A step's plan, in whose gaps items are encoded; None: there is none, and so no gap."""
    try:
        return setting.planned(lengths, strategy)
    except ValueError:  # what is told says that they are encoded besides
        return None


def text_of(encodings: Sequence[Encoding], names: str) -> str:
    """A line on the items, which have these names, and a table of who encodes them."""
    one = encodings[0]
    has_gaps = any(each.step_s != each.outside_s for each in encodings)
    rows: list[tuple[str, ...]] = [(names, "a step longer by", "efficiency")]
    rows += [(each.balance, seconds(each.step_s), f"{each.efficiency:.3f}") for each in encodings]
    how = "besides"
    if has_gaps:
        how = "in gaps of its pipelines"
        outside = ["outside gaps", *(seconds(each.outside_s) for each in encodings)]
        rows = [(*row[:2], cell, row[2]) for row, cell in zip(rows, outside, strict=True)]
    head = f"{one.num_items:,.0f} {names} a step of {one.num_rows:,.0f} rows, encoded {how}:"
    return "\n".join([head, *aligned(rows)])
