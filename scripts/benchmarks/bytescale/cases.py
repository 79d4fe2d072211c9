"""The paper's case study, its ablation and its table of offload ratios, simulated."""

from dataclasses import replace
from typing import Any

import numpy as np
from bytescale.cells import (
    BATCHES,
    IN_ORDER,
    SEEDS,
    STRATEGIES,
    Cell,
    documents,
    execution_of,
    planned,
    split_at,
)
from bytescale.machine import Constants, Layout, job_with, setting_of
from bytescale.paper import (
    ABLATION,
    CASE_FASTEST_S,
    CASE_STEP_S,
    CONTEXTS,
    OFFLOAD,
    ROWS,
)

from megatron_hdp.planner import plan
from megatron_hdp.planner.memory import fullest_stage

CASE = Cell(next(row for row in ROWS if row.name == "llama-7b byted"), len(CONTEXTS) - 1)
_OFFLOAD_TOKENS = 65_536
_OFFLOAD_LAYOUT = Layout(8, 1)


def case_study(constants: Constants) -> dict[str, Any]:
    """Ring steps and steps of 7B at 2M on 1,024 GPUs, mean of all batches."""
    setting = setting_of(CASE.row, CASE.context, constants)
    cost = setting.cost_model
    mesh = CASE.context // setting.tokens_per_rank
    by_name: dict[str, list[float]] = {name: [] for name in ("static", *STRATEGIES)}
    fastest: dict[str, list[float]] = {"naive": [], IN_ORDER: []}
    counts, squares = [], []
    for seed in range(SEEDS):
        for step in range(BATCHES):
            lengths = split_at(documents(CASE.row.data, seed, step), CASE.context)
            for name, found in by_name.items():
                execution = execution_of(setting, lengths, name)
                found.append(execution.step_s)
                if name in fastest:
                    fastest[name].append(float(execution.end_s.min()))
                if name == "static":
                    made = execution.plan
                    counts.append(made.num_micro_batches / (setting.ranks // mesh))
                    squared = lengths.astype(np.float64)[made.sequences] ** 2
                    squares += np.add.reduceat(squared, made.sequence_offsets[:-1]).tolist()
    layers = cost.num_layers
    forward = cost.a / 3 / layers
    hop_s = setting.tokens_per_rank * cost.kv_bytes_per_token / layers / cost.inter_node_bytes_per_s
    return {
        "ranks": setting.ranks,
        "mesh": mesh,
        "micro_batches_of_a_rank": round(float(np.mean(counts)), 2),
        "ring_step_compute_ms": [
            round(1e3 * forward * float(one) / mesh**2, 2)
            for one in np.percentile(squares, (25, 50, 75))
        ],
        "ring_step_traffic_ms": round(1e3 * hop_s / constants.ring_traffic, 2),
        "ring_step_traffic_of_the_model_ms": round(1e3 * hop_s, 2),
        "degree_39_compute_ms": round(1e3 * forward * setting.tokens_per_rank**2, 2),
        "step_s": {name: round(float(np.mean(found)), 1) for name, found in by_name.items()},
        "fastest_rank_s": {
            name: round(float(np.mean(found)), 1) for name, found in fastest.items()
        },
        "paper_step_s": CASE_STEP_S,
        "paper_fastest_rank_s": CASE_FASTEST_S,
    }


def ablation(constants: Constants) -> list[dict[str, Any]]:
    """The paper's ladder on the same cell; what is not simulated has no figure."""
    setting = setting_of(CASE.row, CASE.context, constants)
    offloading = replace(setting, offload="auto")
    runs = {
        "static mesh": (setting, "static"),
        "dynamic communication": (setting, IN_ORDER),
        "selective offload": (offloading, IN_ORDER),
        "balance": (offloading, "bytescale"),
        "balance, no offload": (setting, "bytescale"),
        "auto, no offload": (setting, "auto"),
        "auto": (offloading, "auto"),
    }
    totals = dict.fromkeys(runs, 0.0)
    for step in range(BATCHES):
        lengths = split_at(documents(CASE.row.data, 0, step), CASE.context)
        for name, (chosen, strategy) in runs.items():
            totals[name] += chosen.executed(planned(chosen, lengths, strategy)).step_s
    ours = {name: round(totals["static mesh"] / total, 2) for name, total in totals.items()}
    ladder: list[dict[str, Any]] = [
        {"step": what, "paper": paper, "simulated": ours.get(what)} for what, paper in ABLATION
    ]
    for name in ("balance, no offload", "auto, no offload", "auto"):
        ladder.append({"step": name, "paper": None, "simulated": ours[name]})
    return ladder


def offload_table(constants: Constants) -> list[dict[str, Any]]:
    """Figure 21: 64K tokens of 7B on a rank of eight GPUs; and 256K beside it."""
    found = []
    for ratio, paper_s, paper_gb in OFFLOAD:
        seconds, added, gigabytes = _offloaded(constants, _OFFLOAD_TOKENS, ratio)
        found.append(
            {
                "tokens": _OFFLOAD_TOKENS,
                "ratio": ratio,
                "paper_s": paper_s,
                "paper_gb": paper_gb,
                "simulated_s": round(seconds, 2),
                "added_s": round(added, 2),
                "simulated_gb": round(gigabytes, 1),
            }
        )
    return found


def offload_at_256k(constants: Constants) -> float:
    """Seconds that a ratio of 1 adds to a micro-batch of 256K tokens on the same GPUs."""
    return round(_offloaded(constants, CONTEXTS[0], 1.0)[1], 3)


def _offloaded(constants: Constants, tokens: int, ratio: float) -> tuple[float, float, float]:
    """Seconds of one micro-batch on one rank, what copies add to them, and GB of a GPU."""
    setting = replace(
        setting_of(CASE.row, CASE.context, constants, _OFFLOAD_LAYOUT),
        ranks=1,
        tokens_per_rank=tokens,
        max_length=tokens,
    )
    made = plan([tokens], ranks=1, tokens_per_rank=tokens, cost_model=setting.cost_model)
    normal_s = setting.executed(made).makespan_s
    seconds = setting.executed(replace(made, offload_ratios=np.array([ratio]))).makespan_s
    memory = fullest_stage(job_with("llama-7b", 8, _OFFLOAD_LAYOUT, tokens), tokens)
    layers = setting.cost_model.num_layers
    gone = ratio * (layers - 2) / layers * memory.activations
    held = memory.total - memory.in_flight  # the paper's ring is not TransformerEngine's
    return seconds, seconds - normal_s, (held - gone) / 1e9
