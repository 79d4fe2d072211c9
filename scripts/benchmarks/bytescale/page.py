"""``docs/reproduction.md`` from ``docs/reproduction.json``: every figure of it stands there."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bytescale.checks import NEAR, ORDER, RAMP, VARIANTS, is_near

Figures = dict[str, Any]

_TEMPLATE = Path(__file__).with_name("reproduction.template.md")

_BY_BOUND = "no plan reaches it under these constants: the bound is below the paper's figure"
_NEAR_BOUND = "the plan is within 7 % of the bound"
_BY_PIPELINE = (
    "the pipeline: the longest micro-batch takes 20 s on a stage and no neighbour is as long, so "
    "that ranks idle 16 to 17 s of 78 to 90 (four batches, at four times the effort too); all "
    "cells run the plain schedule; virtual stages would cut that"
)
_BY_PLAN = "the plan"


def page_of(found: Figures) -> str:
    """The whole page."""
    cells = found["cells"]
    below = [cell for cell in cells if cell["auto"] < cell["paper_balanced"]]
    near = {
        name: sum(is_near(cell[name], cell[paper]) for cell in cells)
        for name, paper in (
            ("naive", "paper_naive"),
            ("naive_in_order", "paper_naive"),
            ("bytescale", "paper_balanced"),
        )
    }
    gains = [cell["auto"] / cell["bytescale"] for cell in cells]
    reached = [one["reached"] for one in found["sensitivity"]]
    left = [one["cell"] for one in found["reasons"] if not one["near"]]
    texts = {
        "cells": len(cells),
        "reached": len(cells) - len(below),
        "percent": round(100 * NEAR),
        "least_gain": f"{min(gains):.2f}",
        "most_gain": f"{max(gains):.2f}",
        "least_reached": min(reached),
        "most_reached": max(reached),
        "num_reasons": len(found["reasons"]),
        "num_left": len(left),
        "cells_table": _cells(cells),
        "below": _below(below),
        "letters": _letters(),
        "reasons": _reasons(found["reasons"]),
        "sensitivity": _sensitivity(found["sensitivity"]),
        "ablation": _ablation(found["ablation"]),
        "offload": _offload(found["offload"]),
    }
    return _TEMPLATE.read_text().format_map(found | near | texts)


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _name(cell: Figures) -> str:
    return f"{cell['model']} {cell['data']} {cell['context'] // 1024}K"


def _cells(cells: Sequence[Figures]) -> str:
    names = ("paper_naive", "naive_in_order", "naive", "paper_balanced", "bytescale")
    rows = []
    for cell in cells:
        low, high = cell["auto_spread"]
        mark = " *" if cell["auto"] < cell["paper_balanced"] else ""
        speedups = (f"{cell[name]:.2f}" for name in names)
        auto = (f"{cell['auto']:.2f}{mark}", f"{low:.2f} to {high:.2f}", f"{cell['bound']:.2f}")
        rows.append((_name(cell), f"{cell['ranks']:,}", *speedups, *auto))
    header = ("cell", "ranks", "paper, naive", "naive, as it comes", "naive", "paper, balanced")
    return _table((*header, "bytescale", "auto", "auto, seeds", "bound"), rows)


def _below(cells: Sequence[Figures]) -> str:
    if not cells:
        return "Nowhere."
    rows = []
    for cell in cells:
        paper = cell["paper_balanced"]
        why = _BY_BOUND if cell["bound"] < paper else _BY_PLAN
        if cell["auto"] > 0.93 * cell["bound"] and cell["bound"] >= paper:
            why = _NEAR_BOUND
        if cell["stages"] > 1 and cell["bound"] >= paper:
            why = _BY_PIPELINE
        rows.append(
            (_name(cell), f"{paper:.2f}", f"{cell['auto']:.2f}", f"{cell['bound']:.2f}", why)
        )
    return _table(("cell", "paper, balanced", "auto", "bound", "why"), rows)


def _letters() -> str:
    letters = {
        **{letter: text for letter, (text, _) in VARIANTS.items()},
        ORDER: "naive HDP takes sequences as they come, not longest first",
        RAMP: "the plan without ramps of pipelines and padded positions",
    }
    return "\n".join(f"- **{letter}**: {text}" for letter, text in letters.items())


def _reasons(reasons: Sequence[Figures]) -> str:
    """How many cells of each kind each change explains; the JSON has them one by one."""
    columns = [*VARIANTS, ORDER, RAMP]
    kinds = sorted({(one["strategy"], one["cell"].split()[1]) for one in reasons}, reverse=True)
    rows = []
    for strategy, data in kinds:
        mine = [
            one for one in reasons if (one["strategy"], one["cell"].split()[1]) == (strategy, data)
        ]
        near = [sum(letter in one["near"] for one in mine) for letter in columns]
        common = sorted(one["common_s"] for one in mine)
        rows.append((strategy, data, len(mine), *near, f"{common[0]:.0f} to {common[-1]:.0f}"))
    return _table(("algorithm", "data", "cells", *columns, "common, s"), rows)


def _sensitivity(sets: Sequence[Figures]) -> str:
    form = "{name}|{near}|{spread:.2f}|{reached}|{worst:.2f}|{case_static_s}|{case_bytescale_s}"
    rows = [form.format_map(one).split("|") for one in sets]
    header = ("constants", "algorithm 2 within 25 %", "typical factor", "auto reaches the paper")
    case = ("case study: mesh, s (520)", "balanced, s (157)")
    return _table((*header, "worst auto / paper", *case), rows)


def _ablation(ladder: Sequence[Figures]) -> str:
    def shown(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    rows = [(one["step"], shown(one["paper"]), shown(one["simulated"])) for one in ladder]
    return _table(("step", "paper", "simulated"), rows)


def _offload(table: Sequence[Figures]) -> str:
    form = "{ratio:g}|{paper_s:.2f}|{simulated_s:.2f}|{paper_gb:.0f}|{simulated_gb:.1f}"
    rows = [form.format_map(one).split("|") for one in table]
    return _table(("ratio", "paper, s", "simulated, s", "paper, GB", "computed, GB"), rows)
