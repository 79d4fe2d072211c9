"""Why figures differ from the paper's: the same cells with one thing changed at a time."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from bytescale.cells import (
    BATCHES,
    Cell,
    all_cells,
    documents,
    execution_of,
    split_at,
    step_times_s,
)
from bytescale.machine import Constants, Layout, setting_of

from megatron_hdp.arrays import Int64Array
from megatron_hdp.planner import figures

NEAR = 0.25
"""Figures that differ by no more than this part need no reason."""

_CASE_RATE = {"attention_flops_per_s": 98e12, "linear_flops_per_s": 127e12}
VARIANTS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "C": ("compute at the case study's rate, 2.8 ms a ring step of degree 39", _CASE_RATE),
    "T": ("rings' traffic in BF16 throughout", {"ring_traffic": 1.0}),
    "CT": ("both", {**_CASE_RATE, "ring_traffic": 1.0}),
}
"""By their letters: what they are, and the constants that they change."""
ORDER = "O"
"""Naive HDP in the order of the data instead of longest first."""
RAMP = "P"
"""Plans judged without pipeline ramps and without positions that agree."""

SETS: Mapping[str, Mapping[str, float]] = {
    "as chosen": {},
    "ring traffic 4/3 (gradients in FP32, no more)": {"ring_traffic": 4 / 3},
    "ring traffic 1 (BF16)": {"ring_traffic": 1.0},
    "compute by figure 6a: 111 and 127 TFLOP/s": {
        "attention_flops_per_s": 111e12,
        "linear_flops_per_s": 127e12,
    },
    "compute by the case study: 98 and 127 TFLOP/s": _CASE_RATE,
    "compute by the case study, ring traffic 1": {**_CASE_RATE, "ring_traffic": 1.0},
    "400 TFLOP/s, ring traffic 1": {
        "attention_flops_per_s": 400e12,
        "linear_flops_per_s": 400e12,
        "ring_traffic": 1.0,
    },
}
"""Other sets of constants, one for all cells each."""
COMMON_S = (15.0, 24.0)
"""Seconds added to all steps; 24 are what the case study's balanced step takes longer than ours."""
CASE_NAME = "llama-7b byted 2048K"


def is_near(found: float, paper: float) -> bool:
    """Whether two speed-ups differ by at most a quarter of the paper's."""
    return abs(found / paper - 1) <= NEAR


def common_s(static_s: float, mine_s: float, paper: float) -> float:
    """Seconds that, added to both steps, make their ratio the paper's."""
    return (static_s - paper * mine_s) / (paper - 1)


def reasons_for(cell: Cell, entry: Mapping[str, Any], constants: Constants) -> list[dict[str, Any]]:
    """An entry for each of the paper's algorithms whose figure is far from the paper's."""
    found = []
    for strategy, paper in (("naive", cell.paper_naive), ("bytescale", cell.paper_balanced)):
        if is_near(entry[strategy], paper):
            continue
        tried = {
            letter: _speedup(cell, replace(constants, **changes), strategy)
            for letter, (_, changes) in VARIANTS.items()
        }
        if strategy == "naive":
            tried[ORDER] = entry["naive_in_order"]
        if entry["stages"] > 1:
            tried[RAMP] = _without_ramp(cell, constants, strategy)
        static_s = entry["static_s"]
        found.append(
            {
                "strategy": strategy,
                "cell": cell.name,
                "paper": paper,
                "found": entry[strategy],
                "tried": {letter: round(value, 2) for letter, value in tried.items()},
                "near": [letter for letter, value in tried.items() if is_near(value, paper)],
                "common_s": round(common_s(static_s, static_s / entry[strategy], paper), 1),
            }
        )
    return found


def _speedup(cell: Cell, constants: Constants, strategy: str) -> float:
    times = step_times_s(cell, constants, ("static", strategy), seeds=1)
    return float(times["static"].sum() / times[strategy].sum())


def _batches(cell: Cell) -> list[Int64Array]:
    """Those of the first seed."""
    return [split_at(documents(cell.row.data, 0, step), cell.context) for step in range(BATCHES)]


def _without_ramp(cell: Cell, constants: Constants, strategy: str) -> float:
    setting = setting_of(cell.row, cell.context, constants)
    static_s = mine_s = 0.0
    for lengths in _batches(cell):
        execution = execution_of(setting, lengths, "static")
        static_s += execution.step_s
        after_s = execution.step_s - execution.makespan_s
        made = setting.planned(lengths, strategy)
        all_stages_s = figures(made, setting.cost_model).makespan_s
        mine_s += all_stages_s / setting.pipeline.stages + after_s
    return static_s / mine_s


def sensitivity(constants: Constants) -> list[dict[str, Any]]:
    """How all cells fare under other constants, layouts, and with a time that all steps share."""
    found = [_fares(name, replace(constants, **changes), {}) for name, changes in SETS.items()]
    layouts = {
        "llama-13b": Layout(4, 1),
        "llama-30b": Layout(8, 1),
        "mistral-8x7b": Layout(8, 2),
    }
    name = "layouts of `configs/`: 13B at TP 4, 30B and 8x7B at TP 8"
    found.append(_fares(name, constants, layouts))
    for seconds in COMMON_S:
        name = f"as chosen, and {seconds:.0f} s a step that mesh and HDP have in common"
        found.append(_fares(name, constants, {}, seconds))
    return found


def _fares(
    name: str, constants: Constants, layouts: Mapping[str, Layout], common: float = 0.0
) -> dict[str, Any]:
    near, reached, logs, case = 0, [], [], (0.0, 0.0)
    for cell in all_cells():
        times = step_times_s(
            cell,
            constants,
            ("static", "bytescale", "auto"),
            seeds=1,
            batches=3,
            layout=layouts.get(cell.row.model),
        )
        static, theirs, ours = (float(times[one].mean()) + common for one in times)
        near += is_near(static / theirs, cell.paper_balanced)
        logs.append(np.log(static / theirs / cell.paper_balanced))
        reached.append(static / ours / cell.paper_balanced)
        if cell.name == CASE_NAME:
            case = (static, theirs)
    return {
        "name": name,
        "near": near,
        "spread": round(float(np.exp(np.sqrt(np.mean(np.square(logs))))), 2),
        "reached": sum(one >= 1 for one in reached),
        "worst": round(min(reached), 2),
        "case_static_s": round(case[0]),
        "case_bytescale_s": round(case[1]),
    }
