"""Planners side by side: every strategy on the same batches, judged by the same evaluator.

Prints Markdown tables (``docs/benchmarks.md`` has them): efficiency, bound / makespan, ring traffic
and planning time. A strategy that cannot plan a case, or would take too long, has "-" there and its
reason below. ``python scripts/bench_planner.py --quick`` takes less than a minute.
"""

import argparse
import dataclasses
import fnmatch
import json
import math
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import numpy.typing as npt
from planner_bench.lengths import python_lengths, tailed_lengths

from megatron_hdp.cli.lengths import batch_of
from megatron_hdp.cli.plan_report import share
from megatron_hdp.cli.planning import (
    HYBRID_CP,
    MAX_HYBRID_CP_SEQUENCES,
    Outcome,
    Request,
    outcome_of,
    plan_with,
)
from megatron_hdp.data.presets import LONGEST
from megatron_hdp.planner import LLAMA_7B, CostModel, Plan, evaluate, replay
from megatron_hdp.planner import STRATEGIES as PLANNER_STRATEGIES
from megatron_hdp.planner.pipeline import Pipeline

STRATEGIES = ("static", "naive", "bytescale", HYBRID_CP, "auto")
"""``auto`` is ours: dp-balance, pp-balance with pipeline stages, ep-balance with shared experts."""

_EXPERT_SHARE = 0.5  # of what is linear in the tokens, where ranks share experts
_NOISY_STEPS = 3  # for each batch and strength
_SLOW_PLANNING_MS = 500.0  # measured once
_NOT_RUN = "-"
_KIND_CHARACTERS = 40  # of a problem, numbers left out, that tell its kind


@dataclass(frozen=True)
class Case:
    """One row of the tables."""

    data: str
    """A preset; ``python``: the files of the standard library, a byte being a token; or ``tailed``:
    four of five sequences have 300 to 2,000 tokens, the others a Pareto tail from 3,000 on."""
    ranks: int
    tokens_per_rank: int
    goal: str
    """What the default strategy must reach: bound / makespan, or target / makespan with stages."""
    num_tokens: int | None = None
    """Of the global batch; 4 x ranks x tokens per rank if not given."""
    pipeline_stages: int = 1
    expert_parallel_size: int = 1
    """Ranks that share experts: half of what is linear in the tokens is theirs then."""
    half_speed: bool = False
    """Rank 0 runs at half speed."""
    offload: bool = False
    """Activations may go to host memory."""
    cost_model: CostModel = LLAMA_7B
    """Of a rank, ``num_layers`` being those of the model."""

    @property
    def name(self) -> str:
        """What ``--cases`` matches: data-N64-C8K, with -P4, -E8, -slow, -offload or the tokens."""
        name = f"{self.data}-N{self.ranks}-C{self.tokens_per_rank // 1024}K"
        name += f"-{self.num_tokens // 2**20}M" if self.num_tokens else ""
        name += f"-P{self.pipeline_stages}" if self.pipeline_stages > 1 else ""
        name += f"-E{self.expert_parallel_size}" if self.expert_parallel_size > 1 else ""
        return name + ("-slow" if self.half_speed else "") + ("-offload" if self.offload else "")

    def request(self, seed: int) -> Request:
        """Return what to plan."""
        speeds = (0.5, *[1.0] * (self.ranks - 1)) if self.half_speed else ()
        share = _EXPERT_SHARE if self.expert_parallel_size > 1 else 0.0
        linear = self.cost_model.linear_s_per_token
        return Request(
            lengths=self._lengths(seed),
            ranks=self.ranks,
            tokens_per_rank=self.tokens_per_rank,
            cost_model=dataclasses.replace(
                self.cost_model,
                b=(1 - share) * linear,
                b_experts=share * linear,
                rank_speeds=speeds,
                num_layers=self.cost_model.num_layers // self.pipeline_stages,
            ),
            max_length=min(LONGEST, self.ranks * self.tokens_per_rank),
            pipeline_stages=self.pipeline_stages,
            expert_parallel_size=self.expert_parallel_size,
            offload="auto" if self.offload else "off",
        )

    def _lengths(self, seed: int) -> npt.NDArray[np.int64]:
        if self.data == "python":
            return python_lengths(self.ranks * self.tokens_per_rank, seed)
        if self.data == "tailed":
            return tailed_lengths(self.ranks * self.tokens_per_rank, seed)
        return batch_of(
            f"preset:{self.data}",
            ranks=self.ranks,
            tokens_per_rank=self.tokens_per_rank,
            num_tokens=self.num_tokens,
            seed=seed,
        ).lengths


def all_cases() -> list[Case]:
    """Return the cases in the order of the tables."""
    capacities, presets = (8192, 32768), ("github", "byted")
    few = [
        Case(data, 64, capacity, "mean 0.97, worst 0.95")
        for capacity in capacities
        for data in (*presets, "python")
    ]
    many = [
        Case(data, ranks, capacity, "0.98")
        for ranks in (256, 1024, 4096, 16384)
        for capacity in capacities
        for data in presets
    ]
    stages = [
        Case(data, ranks, 8192, "0.95", pipeline_stages=stages)
        for ranks in (64, 256)
        for stages in (4, 8)
        for data in presets
    ]
    slow = [
        Case(data, 64, 8192, "0.96", half_speed=True, offload=offload)
        for offload in (False, True)
        for data in presets
    ]
    return [*few, *many, Case("byted", 512, 8192, "0.97", 32 * 2**20), *stages, *slow]


def pipeline_cases() -> list[Case]:
    """Return the cases of the table of pipelines."""
    return [
        Case(data, ranks, capacity, "0.95", pipeline_stages=stages)
        for ranks in (16, 64, 256, 1024)
        for capacity in (8192, 32768)
        for data in ("github", "byted")
        for stages in (4, 8)
    ]


def expert_cases() -> list[Case]:
    """Return the cases of the table of ranks that share experts."""
    return [
        Case(data, ranks, capacity, "mean 0.97, worst 0.94", expert_parallel_size=size)
        for ranks in (64, 256, 1024)
        for capacity in (8192, 32768)
        for data in ("github", "byted", "python", "tailed")
        for size in (8, 32, 64)
    ]


@dataclass(frozen=True)
class Result:
    """One strategy on one batch; figures are None where there is no plan."""

    case: str
    seed: int
    strategy: str
    problem: str | None
    num_sequences: int
    efficiency: float | None = None
    """Total compute / sum of speeds / stages / makespan."""
    bound_share: float | None = None
    """Bound / makespan; with pipeline stages the target / makespan."""
    proven_share: float | None = None
    """The tightest bound that is proven / makespan."""
    makespan_s: float | None = None
    lower_bound_s: float | None = None
    ring_bytes: float | None = None
    planning_ms: float | None = None
    """Median of several runs."""
    lost_to_noise: dict[float, float] = dataclasses.field(default_factory=dict)
    """By the strength of the noise in %: the makespan with noise / the one without - 1, a mean."""
    greater_share: float | None = None
    """The greater of bound_share and proven_share."""


def measure(
    case: Case,
    seed: int,
    strategies: Sequence[str],
    repeats: int,
    hybrid_cp_limit: int,
    noise: Sequence[float] = (),
) -> Iterator[Result]:
    """Yield the result of each strategy on one batch."""
    request = case.request(seed)
    for strategy in strategies:
        outcome = outcome_of(strategy, request, hybrid_cp_limit)
        result = Result(case.name, seed, strategy, outcome.problem, len(request.lengths))
        figures = _figures_of(strategy, request, outcome, repeats)
        if outcome.plan is not None and outcome.evaluation is not None:
            lost = {strength: _lost_to_noise(outcome.plan, request, strength) for strength in noise}
            figures["lost_to_noise"] = lost
        yield dataclasses.replace(result, **figures)


def _lost_to_noise(made: Plan, request: Request, strength: float) -> float:
    """What steps take longer whose members each take lognormal times of mean 1, in parts of 1.

    Of a ring the slowest member decides.
    """
    quiet = evaluate(made, request.cost_model, request.pipeline_stages)
    deviation = strength / 100
    makespans = []
    for step in range(_NOISY_STEPS):
        rng = np.random.default_rng(step)
        factors = rng.lognormal(-(deviation**2) / 2, deviation, len(made.ranks))
        duration_s = np.maximum.reduceat(quiet.own_s * factors, made.rank_offsets[:-1])
        makespans.append(replay(made, duration_s, Pipeline(request.pipeline_stages)).makespan_s)
    return fmean(makespans) / quiet.makespan_s - 1


def _figures_of(strategy: str, request: Request, outcome: Outcome, repeats: int) -> dict[str, Any]:
    made, evaluation = outcome.plan, outcome.evaluation
    if made is None or evaluation is None:
        return {}
    planning_ms = [made.summary["planning_ms"]]
    while len(planning_ms) < repeats and planning_ms[0] < _SLOW_PLANNING_MS:
        planning_ms.append(plan_with(strategy, request).summary["planning_ms"])
    pipelined = request.pipeline_stages > 1
    goal_s = evaluation.pipeline_bound_s if pipelined else evaluation.lower_bound_s
    bound_share = share(goal_s, evaluation)
    proven_share = share(outcome.proven_bound_s, evaluation)
    return {
        "efficiency": evaluation.efficiency,
        "bound_share": bound_share,
        "proven_share": proven_share,
        "greater_share": max(bound_share, proven_share),
        "makespan_s": evaluation.makespan_s,
        "lower_bound_s": evaluation.lower_bound_s,
        "ring_bytes": evaluation.ring_bytes,
        "planning_ms": median(planning_ms),
    }


def tables(cases: Sequence[Case], strategies: Sequence[str], results: Sequence[Result]) -> str:
    """Return the Markdown tables, and below them why cells are empty or marked."""
    goals = {case.name: case.goal for case in cases}
    cells: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        cells.setdefault((result.case, result.strategy), []).append(result)

    def table(title: str, note: str, cell: Callable[[list[Result]], str], goal: bool) -> list[str]:
        header = ["case", *strategies, *(["goal"] if goal else [])]
        lines = ["", f"### {title}", "", note, "", _row(header), _row(["---"] * len(header))]
        for name, wanted in goals.items():
            row = [cell(cells.get((name, strategy), [])) for strategy in strategies]
            lines.append(_row([name, *row, *([wanted] if goal else [])]))
        return lines

    lines = table(
        "Bound / makespan",
        "Mean over the seeds (worst). With pipeline stages: target / makespan, the target being "
        "bound / P + (P - 1) / P x a full single-rank micro-batch.",
        lambda of: _mean_and_worst(of, "bound_share"),
        goal=True,
    )
    lines += table(
        "Proven bound / makespan",
        "The same with the tightest bound that is proven for the batch: 1 is optimal.",
        lambda of: _mean_and_worst(of, "proven_share"),
        goal=False,
    )
    if any(case.pipeline_stages > 1 for case in cases):
        lines += table(
            "Greater of target and proven bound / makespan",
            "With pipeline stages; without them it is the proven bound.",
            lambda of: _mean_and_worst(of, "greater_share"),
            goal=False,
        )
    lines += table(
        "Efficiency",
        "(Total compute / sum of speeds / stages) / makespan, mean over the seeds.",
        lambda of: _mean(of, "efficiency", 1, ".3f"),
        goal=False,
    )
    lines += table(
        "Ring traffic",
        "TB of a global batch, forward and backward, mean over the seeds.",
        lambda of: _mean(of, "ring_bytes", 1e-12, ",.1f"),
        goal=False,
    )
    lines += table(
        "Planning time",
        "Milliseconds, one thread: median of several runs, mean over the seeds.",
        lambda of: _mean(of, "planning_ms", 1, ",.1f"),
        goal=False,
    )
    for strength in dict.fromkeys(key for result in results for key in result.lost_to_noise):
        for title, base in (("", "the makespan without it"), (", of the bound", "the bound")):
            lines += table(
                f"Lost to noise of {strength:g} %{title}",
                "Time lost to lognormal noise of mean 1 on every member of every micro-batch, in % "
                f"of {base}: {_NOISY_STEPS} steps a batch, mean over the seeds (worst).",
                partial(_lost, strength=strength, of_the_bound=bool(title)),
                goal=False,
            )
    return "\n".join([*lines, "", *_notes(results)])


def _row(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def _figures(of: Sequence[Result], name: str) -> list[float]:
    return [value for result in of if (value := getattr(result, name)) is not None]


def _mean(of: Sequence[Result], name: str, scale: float, form: str) -> str:
    figures = _figures(of, name)
    return format(scale * fmean(figures), form) + _mark(of) if figures else _NOT_RUN


def _mean_and_worst(of: Sequence[Result], name: str) -> str:
    figures = _figures(of, name)
    if not figures:
        return _NOT_RUN
    return f"{fmean(figures):.3f} ({min(figures):.3f})" + _mark(of)


def _lost(of: Sequence[Result], strength: float, of_the_bound: bool) -> str:
    lost = [
        100 * value * (_over_the_bound(result) if of_the_bound else 1)
        for result in of
        if (value := result.lost_to_noise.get(strength)) is not None
    ]
    return f"{fmean(lost):.1f} ({max(lost):.1f})" if lost else _NOT_RUN


def _over_the_bound(result: Result) -> float:
    return (result.makespan_s or 0.0) / (result.lower_bound_s or math.inf)


def _mark(of: Sequence[Result]) -> str:
    """A star where some of the seeds have no plan, or one that breaks a rule."""
    return "*" if any(result.problem for result in of) else ""


def _notes(results: Sequence[Result]) -> list[str]:
    """One line for each strategy and kind of problem, with the first problem of that kind."""
    kinds: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if result.problem:
            kind = re.sub(r"[\d,]+", "", result.problem)[:_KIND_CHARACTERS]
            kinds.setdefault((result.strategy, kind), []).append(result)
    return [
        f"- {strategy}: {len(of)} of {len(results_of(strategy, results))} batches, such as "
        f"{of[0].case}, seed {of[0].seed}: {of[0].problem}"
        for (strategy, _), of in kinds.items()
    ]


def results_of(strategy: str, results: Sequence[Result]) -> list[Result]:
    """Return the results of one strategy."""
    return [result for result in results if result.strategy == strategy]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--cases", nargs="+", default=["*"], metavar="GLOB", help="names of cases, as in byted-*")
    add("--seeds", type=int, default=3, help="batches a case (default: 3)")
    add(
        "--strategies",
        nargs="+",
        choices=(*PLANNER_STRATEGIES, HYBRID_CP),
        default=STRATEGIES,
        help=f"default: {' '.join(STRATEGIES)}",
    )
    add("--repeats", type=int, default=5, help="plannings that the time is the median of")
    add(
        "--latency",
        type=float,
        nargs=3,
        default=(0.0, 0.0, 0.0),
        metavar=("INTRA", "INTER", "BLOCK"),
        help="us a layer of a hop in a node, of one between nodes, of a block of attention: known "
        "to the strategies, and judged by (default: 0 0 0)",
    )
    add(
        "--noise",
        type=float,
        nargs="+",
        default=(),
        metavar="PERCENT",
        help="also run the plans with so much lognormal noise on every micro-batch",
    )
    add(
        "--pipelines", action="store_true", help="the cases with pipeline stages, 16 to 1,024 ranks"
    )
    add("--experts", action="store_true", help="the cases with ranks that share experts")
    add("--quick", action="store_true", help="up to 256 ranks, one seed")
    add(
        "--hybrid-cp-limit",
        type=int,
        default=MAX_HYBRID_CP_SEQUENCES,
        metavar="SEQUENCES",
        help="run Megatron's scheduler on up to so many sequences (default: %(default)s)",
    )
    add("--json", metavar="FILE", help="also write every single result")
    add("--list", action="store_true", help="print the names of the cases")
    arguments = parser.parse_args(argv)
    for flag in ("seeds", "repeats"):
        if getattr(arguments, flag) < 1:
            parser.error(f"--{flag} is {getattr(arguments, flag)}; expected at least 1")
    if arguments.experts and (arguments.pipelines or arguments.noise):
        other = "--pipelines" if arguments.pipelines else "--noise"
        parser.error(f"found --experts and {other}; expected one of them")
    for flag in ("latency", "noise"):
        if not all(0 <= value < math.inf for value in getattr(arguments, flag)):
            values = " ".join(f"{value:g}" for value in getattr(arguments, flag))
            parser.error(f"--{flag} is {values}; expected finite numbers >= 0")
    return arguments


def chosen_cases(arguments: argparse.Namespace) -> list[Case]:
    """Return the cases that the flags name.

    Raises:
        ValueError: a pattern matches no case.
    """
    intra_node, inter_node, block = (1e-6 * value for value in arguments.latency)
    cost_model = dataclasses.replace(
        LLAMA_7B, intra_node_hop_s=intra_node, inter_node_hop_s=inter_node, block_s=block
    )
    of_kind = pipeline_cases if arguments.pipelines else all_cases
    cases = [
        dataclasses.replace(case, cost_model=cost_model)
        for case in (expert_cases if arguments.experts else of_kind)()
        if not arguments.quick or case.ranks <= 256
    ]
    for pattern in arguments.cases:
        if not fnmatch.filter([case.name for case in cases], pattern):
            raise ValueError(f"--cases {pattern}: no case has such a name; --list prints them")
    return [
        case
        for case in cases
        if any(fnmatch.fnmatch(case.name, pattern) for pattern in arguments.cases)
    ]


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; progress goes to stderr, the tables to stdout."""
    arguments = parse(argv)
    cases = chosen_cases(arguments)
    if arguments.list:
        print("\n".join(case.name for case in cases))
        return 0
    results: list[Result] = []
    for case in cases:
        for seed in range(1 if arguments.quick else arguments.seeds):
            print(f"{case.name}, seed {seed}", file=sys.stderr, flush=True)
            results += measure(
                case,
                seed,
                arguments.strategies,
                arguments.repeats,
                arguments.hybrid_cp_limit,
                arguments.noise,
            )
    command = " ".join(["python scripts/bench_planner.py", *argv])
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"`{command}` on {machine}")
    print(tables(cases, arguments.strategies, results))
    if arguments.json:
        document = {
            "command": command,
            "machine": machine,
            "results": [dataclasses.asdict(result) for result in results],
        }
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (ValueError, OSError) as error:
        sys.exit(f"bench_planner: error: {error}")
