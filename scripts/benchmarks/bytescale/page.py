"""``docs/reproduction.md`` from ``docs/reproduction.json``: every figure of it stands there."""

import string
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bytescale import texts
from bytescale.checks import NEAR, ORDER, RAMP, VARIANTS, is_near

Figures = dict[str, Any]

_TEMPLATE = Path(__file__).with_name("reproduction.template.md")


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
    template = string.Template(_TEMPLATE.read_text())
    return template.substitute(
        near,
        cells=len(cells),
        reached=len(cells) - len(below),
        seeds=found["seeds"],
        batches=found["batches"],
        percent=round(100 * NEAR),
        least_gain=f"{min(gains):.2f}",
        most_gain=f"{max(gains):.2f}",
        least_reached=min(reached),
        most_reached=max(reached),
        num_reasons=len(found["reasons"]),
        num_left=len(left),
        added_256k=found["offload_256k_s"],
        constants=_constants(found["constants"]),
        cells_table=_cells(cells),
        below=_below(below),
        letters=_letters(),
        reasons=_reasons(found["reasons"]),
        sensitivity=_sensitivity(found["sensitivity"]),
        case_study=_case_study(found["case_study"]),
        ablation=_ablation(found["ablation"]),
        offload=_offload(found["offload"]),
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _constants(constants: Figures) -> str:
    rows = [
        (text, form.format(constants[name]), source) for name, text, form, source in texts.CONSTANTS
    ]
    return _table(("constant", "value", "from"), rows)


def _name(cell: Figures) -> str:
    return f"{cell['model']} {cell['data']} {cell['context'] // 1024}K"


def _cells(cells: Sequence[Figures]) -> str:
    rows = []
    for cell in cells:
        low, high = cell["auto_spread"]
        mark = " *" if cell["auto"] < cell["paper_balanced"] else ""
        rows.append(
            (
                _name(cell),
                f"{cell['ranks']:,}",
                f"{cell['paper_naive']:.2f}",
                f"{cell['naive_in_order']:.2f}",
                f"{cell['naive']:.2f}",
                f"{cell['paper_balanced']:.2f}",
                f"{cell['bytescale']:.2f}",
                f"{cell['auto']:.2f}{mark}",
                f"{low:.2f} to {high:.2f}",
                f"{cell['bound']:.2f}",
            )
        )
    header = ("cell", "ranks", "paper, naive", "naive, as it comes", "naive", "paper, balanced")
    return _table((*header, "bytescale", "auto", "auto, seeds", "bound"), rows)


def _below(cells: Sequence[Figures]) -> str:
    if not cells:
        return "Nowhere."
    rows = []
    for cell in cells:
        paper = cell["paper_balanced"]
        why = texts.BY_BOUND if cell["bound"] < paper else texts.BY_PLAN
        if cell["auto"] > 0.93 * cell["bound"] and cell["bound"] >= paper:
            why = texts.NEAR_BOUND
        if cell["stages"] > 1 and cell["bound"] >= paper:
            why = texts.BY_PIPELINE
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
    rows = [
        (
            one["name"],
            one["near"],
            f"{one['spread']:.2f}",
            one["reached"],
            f"{one['worst']:.2f}",
            one["case_static_s"],
            one["case_bytescale_s"],
        )
        for one in sets
    ]
    header = ("constants", "algorithm 2 within 25 %", "typical factor", "auto reaches the paper")
    case = ("case study: mesh, s (520)", "balanced, s (157)")
    return _table((*header, "worst auto / paper", *case), rows)


def _case_study(case: Figures) -> str:
    low, middle, high = case["ring_step_compute_ms"]
    paper, mine, fastest = case["paper_step_s"], case["step_s"], case["fastest_rank_s"]
    in_order = "naive_in_order"
    rows = [
        (
            "mesh, micro-batches of a rank",
            "CP 256, 8",
            f"CP {case['mesh']}, {case['micro_batches_of_a_rank']}",
        ),
        (
            "ring step of the mesh, compute",
            "0.3 to 0.4 ms",
            f"{middle} ms (half of them {low} to {high})",
        ),
        (
            "ring step of the mesh, traffic",
            "1.4 to 1.6 ms",
            f"{case['ring_step_traffic_ms']} ms, with the factor "
            f"{case['ring_step_traffic_of_the_model_ms']} ms",
        ),
        ("ring step of degree 39, compute", "2.8 ms", f"{case['degree_39_compute_ms']} ms"),
        ("step, static mesh", f"{paper['static']:.0f} s", f"{mine['static']:.0f} s (calibrated)"),
        (
            "step, naive HDP (fastest rank)",
            f"{paper['naive']:.0f} s ({case['paper_fastest_rank_s']:.0f} s)",
            f"as it comes {mine[in_order]:.0f} s ({fastest[in_order]:.0f} s), longest first "
            f"{mine['naive']:.0f} s ({fastest['naive']:.0f} s)",
        ),
        (
            "step, balanced HDP",
            f"{paper['balanced']:.0f} s",
            f"bytescale {mine['bytescale']:.0f} s, auto {mine['auto']:.0f} s",
        ),
    ]
    return _table(("", "paper", "simulated"), rows)


def _ablation(ladder: Sequence[Figures]) -> str:
    def shown(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    rows = [(one["step"], shown(one["paper"]), shown(one["simulated"])) for one in ladder]
    return _table(("step", "paper", "simulated"), rows)


def _offload(table: Sequence[Figures]) -> str:
    rows = [
        (
            f"{one['ratio']:g}",
            f"{one['paper_s']:.2f}",
            f"{one['simulated_s']:.2f}",
            f"{one['paper_gb']:.0f}",
            f"{one['simulated_gb']:.1f}",
        )
        for one in table
    ]
    return _table(("ratio", "paper, s", "simulated, s", "paper, GB", "computed, GB"), rows)
