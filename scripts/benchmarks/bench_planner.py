"""Planners side by side: every strategy on the same batches, judged by the same evaluator.

Prints Markdown tables (``docs/benchmarks.md`` has them): efficiency, bound / makespan, ring traffic
and planning time; with ``--pipelines`` what virtual stages bring, with ``--experts`` ranks that
share experts, with both both; with ``--step`` what the Python of one rank does for a step. A
strategy that cannot plan a case, or would take too long, has "-" there and its reason below.
``python scripts/benchmarks/bench_planner.py --quick`` takes less than a minute.
"""

import argparse
import dataclasses
import fnmatch
import itertools
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from planner_bench.cases import (
    Case,
    all_cases,
    expert_cases,
    expert_pipeline_cases,
    pipeline_cases,
)
from planner_bench.measuring import Result, measure
from planner_bench.staged import OURS, Staged, measure_staged
from planner_bench.staged_tables import StagedTables
from planner_bench.tables import tables

from megatron_hdp.options import auto_or
from megatron_hdp.planner import LLAMA_7B
from megatron_hdp.planner import STRATEGIES as PLANNER_STRATEGIES
from megatron_hdp.planner.parts import auto_parts

STRATEGIES = ("static", "naive", "bytescale", "auto")
"""``auto`` is ours: dp-balance, pp-balance with pipeline stages, ep-balance with shared experts."""

STAGED_STRATEGIES = ("static", "bytescale", "dynamic-cp", "auto")
"""Of the tables of pipelines; with shared experts pp-balance, too."""

VIRTUAL_STAGES = (1, 4)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--cases", nargs="+", default=["*"], metavar="GLOB", help="names of cases, as in byted-*")
    add("--seeds", type=int, default=3, help="batches a case (default: 3)")
    add(
        "--strategies",
        nargs="+",
        choices=PLANNER_STRATEGIES,
        help=f"default: {' '.join(STRATEGIES)}; with --pipelines {' '.join(STAGED_STRATEGIES)}, "
        "with --experts, too, also pp-balance",
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
    add(
        "--virtual-stages",
        type=int,
        nargs="+",
        metavar="V",
        help="with --pipelines: parts of the model on each stage, each V a column (default: 1 4)",
    )
    add(
        "--sequence-parts",
        type=auto_or(int),
        default=None,
        metavar="auto|N",
        help="with --pipelines: also ours with micro-batches in up to N parts; 1: no; auto: 8 for "
        "each stage (default: auto)",
    )
    add(
        "--tokens",
        type=int,
        metavar="K",
        help="of a global batch: K x ranks x tokens per rank (default: 4, or what a case says)",
    )
    add("--experts", action="store_true", help="the cases with ranks that share experts")
    add(
        "--step",
        action="store_true",
        help="instead, what one rank does for a step of a case and at its job's start",
    )
    add("--quick", action="store_true", help="up to 256 ranks, one seed")
    add("--json", metavar="FILE", help="also write every single result")
    add("--list", action="store_true", help="print the names of the cases")
    arguments = parser.parse_args(argv)
    for flag in ("seeds", "repeats", "sequence_parts"):
        if getattr(arguments, flag) is not None and getattr(arguments, flag) < 1:
            name = flag.replace("_", "-")
            parser.error(f"--{name} is {getattr(arguments, flag)}; expected at least 1")
    if arguments.tokens is not None and arguments.tokens < 1:
        parser.error(f"--tokens is {arguments.tokens}; expected at least 1")
    if arguments.noise and (arguments.pipelines or arguments.experts):
        other = "--pipelines" if arguments.pipelines else "--experts"
        parser.error(f"found {other} and --noise; expected one of them")
    for flag in ("latency", "noise"):
        if not all(0 <= value < math.inf for value in getattr(arguments, flag)):
            values = " ".join(f"{value:g}" for value in getattr(arguments, flag))
            parser.error(f"--{flag} is {values}; expected finite numbers >= 0")
    _check_stages(arguments, parser)
    return arguments


def _check_stages(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse what the tables of pipelines cannot have; fill in what they have by default."""
    found = arguments.virtual_stages
    if found is not None:
        values = " ".join(map(str, found))
        if not arguments.pipelines:
            parser.error(f"found --virtual-stages {values}; expected --pipelines with it")
        if min(found) < 1 or len(set(found)) < len(found):
            parser.error(f"--virtual-stages is {values}; expected different numbers >= 1")
    arguments.virtual_stages = tuple(found or VIRTUAL_STAGES)
    if arguments.strategies is None:
        of_kind = STAGED_STRATEGIES if arguments.pipelines else STRATEGIES
        blind = ("pp-balance",) if arguments.pipelines and arguments.experts else ()
        arguments.strategies = (*of_kind[:-1], *blind, of_kind[-1])
    if arguments.pipelines and OURS not in arguments.strategies:
        parser.error(
            f"--strategies is {' '.join(arguments.strategies)}; with --pipelines expected "
            f"{OURS} among them, which the others are compared with"
        )


def chosen_cases(arguments: argparse.Namespace) -> list[Case]:
    """Return the cases that the flags name.

    Raises:
        ValueError: a pattern matches no case, or the model has fewer layers than virtual stages.
    """
    intra_node, inter_node, block = (1e-6 * value for value in arguments.latency)
    cost_model = dataclasses.replace(
        LLAMA_7B, intra_node_hop_s=intra_node, inter_node_hop_s=inter_node, block_s=block
    )
    of_kind = {
        (False, False): all_cases,
        (False, True): expert_cases,
        (True, False): pipeline_cases,
        (True, True): expert_pipeline_cases,
    }[arguments.pipelines, arguments.experts]
    cases = [
        dataclasses.replace(
            case,
            cost_model=cost_model,
            num_tokens=(arguments.tokens or 0) * case.ranks * case.tokens_per_rank
            or case.num_tokens,
        )
        for case in of_kind()
        if not arguments.quick or case.ranks <= 256
    ]
    for pattern in arguments.cases:
        if not fnmatch.filter([case.name for case in cases], pattern):
            raise ValueError(f"--cases {pattern}: no case has such a name; --list prints them")
    chosen = [
        case
        for case in cases
        if any(fnmatch.fnmatch(case.name, pattern) for pattern in arguments.cases)
    ]
    if arguments.pipelines:
        stages, chunks = max(case.pipeline_stages for case in chosen), max(arguments.virtual_stages)
        if stages * chunks > cost_model.num_layers:
            raise ValueError(
                f"--virtual-stages {chunks} with {stages} stages needs {stages * chunks} layers; "
                f"the model has {cost_model.num_layers}"
            )
    return chosen


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; progress goes to stderr, the tables to stdout."""
    arguments = parse(argv)
    cases = chosen_cases(arguments)
    if arguments.list:
        print("\n".join(case.name for case in cases))
        return 0
    command = shlex.join(["python", "scripts/benchmarks/bench_planner.py", *argv])
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    if arguments.step:
        from planner_bench.rank_step import parts_of, step_table  # with torch and Megatron

        parts = [parts_of(case, 0, arguments.repeats) for case in cases]
        print(f"`{command}` on {machine}\n\n{step_table(cases, parts)}")
        return 0
    strategies, chunks, repeats = arguments.strategies, arguments.virtual_stages, arguments.repeats
    results: list[Result | Staged] = []
    for case, seed in itertools.product(cases, range(1 if arguments.quick else arguments.seeds)):
        print(f"{case.name}, seed {seed}", file=sys.stderr, flush=True)
        if arguments.pipelines:
            most = arguments.sequence_parts or auto_parts(case.pipeline_stages)
            parts = 1 if arguments.experts else most
            results += measure_staged(case, seed, strategies, chunks, repeats, parts)
        else:
            results += measure(case, seed, strategies, repeats, arguments.noise)
    if arguments.pipelines:
        text = str(StagedTables(cases, strategies, chunks, results))
    else:
        text = tables(cases, strategies, results)
    print(f"`{command}` on {machine}")
    print(text)
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
