"""The parts of a report that are text: the table, what was assumed, what is not known."""

import dataclasses
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from megatron_hdp.planner import CostModel
from megatron_hdp.simulator.execution import Machine, Run
from megatron_hdp.simulator.report.figures import (
    COLUMNS,
    Subject,
    cells,
    headline,
    mean_parts,
    warnings,
)
from megatron_hdp.simulator.units import num_bytes, seconds, stages_of

_MOST_SLOW = 16  # ranks that are named
_MEANINGS = (
    "step time: median of the steps, from a first forward to the next step's",
    "bubble: share of all ranks' time in the step in which they wait for others or for data",
    "ring traffic: bytes that all ranks send in rings in a step",
    "MFU: the model's FLOP, causal, without recomputation, as a share of the GPUs' peak",
    "peak memory: of the fullest GPU in any step",
    "speed-up: over the static mesh",
)
NOT_KNOWN = (
    "Congestion: rings, messages of pipeline stages and gradient sync that share a link each have "
    "it for themselves; rings of other jobs are not there.",
    "NCCL: its channels take no multiprocessors from kernels here, and its protocols no start-up "
    "time beyond the cost model's latency of a hop.",
    "Clocks: no GPU throttles for heat or power; one that is slow by nature has to be told "
    "(--slow, --rank-speeds).",
    "Traffic inside tensor-parallel ranks and between experts, unless the cost model was measured "
    "with it.",
    "Layers that are unlike; embedding and loss count in none.",
    "The allocator's fragments; nothing stops a plan that needs more memory than a GPU has.",
    "Checkpoints, evaluation, failures (simulate --mtbf has these).",
)


def opening(run: Run, subject: Subject) -> str:
    """HTML of what stands first: the sentence, the table, what to beware of."""
    rows = [cells(run, name) for name in run.outcomes]
    beware = "".join(f"<li>{escape(text)}</li>" for text in warnings(run, subject))
    return (
        f"<h1>{escape(headline(run))}</h1>\n"
        f'<p class="note">{escape(about(run, subject))}</p>\n'
        f"{table('By strategy', COLUMNS, rows)}"
        f'<p class="note">{escape("; ".join(_MEANINGS))}.</p>\n'
        + (f'<ul class="beware">{beware}</ul>\n' if beware else "")
    )


def about(run: Run, subject: Subject) -> str:
    """What was run, in a line."""
    setting = run.setting
    steps = [step for one in run.outcomes.values() for step in one.steps]
    count = max((len(one.steps) for one in run.outcomes.values()), default=0)
    tokens = f" of {sum(s.num_tokens for s in steps) / len(steps):,.0f} tokens" if steps else ""
    stages = stages_of(setting.pipeline, ", {} pipeline stages")
    return (
        f"{subject.config}; lengths: {subject.data}; {setting.num_gpus:,} GPUs: {setting.ranks:,} "
        f"HDP ranks of {setting.tokens_per_rank:,} tokens{stages}; {count:,} "
        f"step{'s' if count != 1 else ''}{tokens}; simulated, nothing was trained"
    )


def parts_table(run: Run) -> str:
    """HTML of the seconds of the parts of a step."""
    parts = {name: mean_parts(one.steps) for name, one in run.outcomes.items() if one.steps}
    if not parts:
        return ""
    header = ("strategy", *next(iter(parts.values())), "step")
    rows = [
        (name, *(f"{value:.4g} s" for value in of.values()), f"{sum(of.values()):.4g} s")
        for name, of in parts.items()
    ]
    return (
        "<details><summary>The same in numbers</summary>\n"
        f"{table('Seconds of the parts of a step, means of the steps', header, rows)}</details>\n"
    )


def closing(run: Run, subject: Subject, left_out: Sequence[str]) -> str:
    """HTML of what was assumed, what is not known and what the page leaves out."""
    parts = [
        "<h2>What was assumed</h2>\n<div class=columns>\n",
        table("The run", ("what", "value"), _run_rows(run, subject)),
        table("Machine", ("key", "value"), _rows(run.setting.machine)),
        table("Cost model", ("coefficient", "value"), _rows(run.setting.cost_model)),
        "</div>\n<h2>What the simulation does not know</h2>\n",
        _list(NOT_KNOWN),
        "<h2>What this page leaves out</h2>\n",
        _list(left_out or ["Nothing: all ranks and steps are shown."]),
    ]
    return "".join(parts)


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """HTML of a table; its first column names its rows."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    lines = [
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>\n"
        for row in rows
    ]
    return (
        f'<div class="table"><table>\n<caption>{escape(caption)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{''.join(lines)}</tbody>\n</table></div>\n"
    )


def _list(texts: Iterable[str]) -> str:
    return "<ul>\n" + "".join(f"<li>{escape(text)}</li>\n" for text in texts) + "</ul>\n"


def _run_rows(run: Run, subject: Subject) -> list[tuple[str, str]]:
    setting, disturbance = run.setting, run.setting.disturbance
    slow = sorted(disturbance.slow.items())
    named = ", ".join(f"{rank:,}: {speed:g}" for rank, speed in slow[:_MOST_SLOW])
    more = f" and {len(slow) - _MOST_SLOW:,} more" if len(slow) > _MOST_SLOW else ""
    limit = subject.gpu_memory_bytes
    return [
        ("configuration", subject.config),
        ("lengths", subject.data),
        ("cost model", subject.cost_model or "assumed from the model's shape"),
        ("seed", str(run.seed)),
        ("noise (sigma)", f"{disturbance.noise:g}"),
        ("slow ranks, unknown to the planner", named + more if slow else "none"),
        ("longest sequence", "-" if setting.max_length is None else f"{setting.max_length:,}"),
        ("offload", setting.offload),
        ("ranks in lockstep", f"{setting.lockstep_ranks:,}"),
        ("memory of a GPU", "-" if limit is None else num_bytes(limit)),
    ]


def _rows(values: Machine | CostModel) -> list[tuple[str, str]]:
    names = [field.name for field in dataclasses.fields(values)]
    return [(name, _value(name, getattr(values, name))) for name in names]


def _value(name: str, value: Any) -> str:
    if value in (None, (), ""):
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple) and isinstance(value[0], tuple):
        return f"{len(value):,} points"
    if isinstance(value, tuple):
        least, most = _value(name, min(value)), _value(name, max(value))
        return least if least == most else f"{least} to {most}"
    if name.endswith("flops_per_s"):
        return f"{value / 1e12:,.0f} TFLOP/s"
    if name.endswith("bytes_per_s"):
        return f"{num_bytes(value)}/s"
    if name.endswith("_bytes"):
        return num_bytes(value)
    if name.endswith("_s"):
        return seconds(value) if value else "0 s"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
