"""``megatron-hdp plan``: plans one global batch of given lengths and says how good the plan is."""

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from megatron_hdp.cli.lengths import read_lengths

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

STRATEGIES = ("static", "naive", "dp-balance", "auto")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser("plan", help="plan a global batch and print its efficiency")
    add = parser.add_argument
    add("--lengths", required=True, metavar="FILE", help="one sequence length a line, or an .idx")
    add("--ranks", type=int, required=True, metavar="N", help="HDP ranks")
    add(
        "--tokens-per-rank",
        type=int,
        required=True,
        metavar="C",
        help="capacity: tokens that one rank holds in one micro-batch",
    )
    add(
        "--max-length", type=int, metavar="L", help="context length; longer sequences are cut to it"
    )
    add("--strategy", choices=STRATEGIES, default="auto", help="how to plan (default: auto)")
    add("--cost-model", metavar="FILE", help="JSON with coefficients (default: LLaMA-7B's)")
    add(
        "--ranks-per-node",
        type=int,
        metavar="K",
        help="HDP ranks of a node (default: the cost model's, 8 unless it says otherwise)",
    )
    add("--output", metavar="FILE", help="write the plan as JSON")
    add("--plot", metavar="FILE", help="draw the plan, one lane a rank (.png, .svg, .pdf)")
    add("--compare", action="store_true", help="print every strategy side by side")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from megatron_hdp.cli import plan_report
    from megatron_hdp.planner import LLAMA_7B, CostModel, evaluate, plan

    lengths = _cut(read_lengths(arguments.lengths), arguments.max_length)
    cost_model = CostModel.from_json(arguments.cost_model) if arguments.cost_model else LLAMA_7B
    if arguments.ranks_per_node is not None:
        cost_model = dataclasses.replace(cost_model, ranks_per_node=arguments.ranks_per_node)
    options: dict[str, Any] = {
        "ranks": arguments.ranks,
        "tokens_per_rank": arguments.tokens_per_rank,
        "max_length": arguments.max_length,
        "cost_model": cost_model,
    }
    chosen = plan(lengths, strategy=arguments.strategy, **options)
    evaluation = evaluate(chosen, cost_model)
    print(plan_report.batch_line(chosen))
    if arguments.compare:
        print(plan_report.comparison(lengths, STRATEGIES, options))
    else:
        print(plan_report.summary(chosen, evaluation))
    if arguments.output:
        chosen.save(arguments.output)
        print(f"plan written to {arguments.output}")
    if arguments.plot:
        from megatron_hdp.simulator.plot import plot_plan

        plot_plan(chosen, evaluation, arguments.plot)
        print(f"picture written to {arguments.plot}")
    return 0


def _cut(lengths: "npt.NDArray[np.int64]", max_length: int | None) -> "npt.NDArray[np.int64]":
    if max_length is None:
        return lengths
    if max_length < 1:
        raise ValueError(f"--max-length {max_length}: expected at least 1 token")
    num_longer = int((lengths > max_length).sum())
    if num_longer:
        print(f"{num_longer:,} of {len(lengths):,} sequences cut to {max_length:,} tokens")
    return lengths.clip(max=max_length)
