"""``megatron-hdp plan``: plans one global batch and says how good the plan is.

Of given lengths it plans rings; of the sizes of images and videos, who encodes what.
"""

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatron_hdp.cli.shared.numbers import above_zero, number, whole
from megatron_hdp.cli.shared.outputs import check_outputs
from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.options import auto_or
from megatron_hdp.strategies import AUTO, CHOICES, HELP

if TYPE_CHECKING:
    from megatron_hdp.cli.plan_outcomes import Outcome, Request

_WRITTEN = ("--output", "--plot", "--trace")
_OF_ITEMS = (
    *("items", "encoder", "media_balance", "micro_batches", "replica_ranks", "patches_per_pack"),
)
_NO_FLAGS = ("run", "default_of", "subcommand")
_OF_BOTH = ("ranks", "ranks_per_node", "rank_speeds", "compare", "output", "plot")
_MODELS = "llama-7b, -13b, -30b, -70b, mistral-8x7b, -8x22b"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "plan", help="plan one global batch and print the plan's efficiency"
    )
    _add_batch(parser.add_argument_group("the global batch"))
    ranks = parser.add_argument_group("the ranks and what they cost")
    _add_ranks(ranks)
    _add_experts(ranks)
    _add_planning(parser.add_argument_group("how to plan"))
    _add_items(parser.add_argument_group("images and videos of a step, with --items"))
    _add_results(parser.add_argument_group("results"))
    parser.set_defaults(run=_run, default_of=parser.get_default)


def _add_batch(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    given = group.add_mutually_exclusive_group(required=True)
    given.add_argument(
        "--lengths",
        metavar="FILE|preset:github|preset:byted",
        help="a text file with one sequence length per line, an .idx file, or lengths drawn from a "
        "preset of the paper's datasets",
    )
    given.add_argument(
        "--items",
        metavar="FILE",
        help="a text file with an image or a video per line, HEIGHT WIDTH [FRAMES] in pixels: plan "
        "which ranks encode them; they lie in the step's sequences in this order",
    )
    number(
        add,
        *("--global-batch-tokens", "T", 1, 2**60),
        "size of the batch in tokens; with a file, take sequences in order while they fit "
        "(default: 4 x N x C with a preset, else all sequences)",
    )
    number(add, "--seed", "S", 0, 2**64 - 1, "seed with which a preset is drawn (default: 0)")
    number(
        add,
        *("--max-length", "L", 1, 2**40),
        "context length; longer sequences are cut to it (default with a preset: 2M or N x C, "
        "whichever is smaller)",
    )


def _add_ranks(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    number(
        add, "--ranks", "N", 1, 2**20, "HDP ranks; with --items all ranks of the job", required=True
    )
    number(
        add,
        *("--tokens-per-rank", "C", 1, 2**40),
        "capacity: the most tokens that one rank holds in a micro-batch; --lengths needs it",
    )
    number(add, "--pipeline-stages", "P", 1, 1024, "pipeline stages of a rank", default=1)
    number(
        add,
        *("--virtual-stages", "V", 1, 1024),
        "model chunks on each stage; above 1 the schedule is interleaved",
        default=1,
    )
    add(
        "--sequence-parts",
        type=auto_or(whole(1, 1024)),
        metavar="auto|N",
        default=1,
        help="the most parts of equal time in which a micro-batch may pass the stages; each runs "
        "in as many as make the step shortest; auto: 8 for each stage (default: 1)",
    )
    add(
        "--stage-weights",
        type=_weights,
        default=None,
        metavar="W,W,...",
        help="relative time of each of the P x V virtual stages in the model's order (default: all "
        "equal)",
    )
    add(
        "--model",
        metavar="NAME|FILE.yaml",
        help=f"{_MODELS}, or a YAML file of training's flags with the model's shape (default: "
        "llama-7b)",
    )
    add(
        "--cost-model",
        metavar="FILE",
        help="JSON file with measured coefficients, instead of --model",
    )
    number(
        add,
        *("--ranks-per-node", "K", 1, 2**20),
        "HDP ranks of a node (default: the cost model's, or 8)",
    )
    add(
        "--double-rings",
        choices=("auto", "on", "off"),
        default="auto",
        help="whether rings over several nodes send on the links of all their members of a node; "
        "auto: as the cost model says, and in parts (default: auto)",
    )
    add(
        "--rank-speeds",
        metavar="FILE",
        help="text file with the speed of one rank per line; 1 is full speed",
    )


def _weights(text: str) -> tuple[float, ...]:
    """Numbers with commas between them."""
    try:
        return tuple(float(one) for one in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; expected numbers with commas between them, as 1,1,1,0.8"
        ) from None


def _add_experts(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    number(
        add,
        *("--expert-parallel-size", "E", 1, 2**20),
        "neighbouring HDP ranks that share experts and wait for each other in every layer",
        default=1,
    )
    add(
        "--expert-share",
        type=float,
        metavar="X",
        help="experts' share of the cost model's seconds per token without attention, 0 to 1 "
        "(default: the cost model's)",
    )


def _add_planning(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--strategy",
        choices=CHOICES,
        default=AUTO,
        help=f"{HELP} (default: {AUTO})",
    )
    add(
        "--offload",
        choices=("auto", "off"),
        default="off",
        help="auto moves activations to host memory where that saves ranks (default: off)",
    )
    add(
        "--host-memory-gb",
        type=above_zero,
        metavar="GB",
        help="the most host memory that a micro-batch may fill on a rank (default: no limit)",
    )
    add(
        "--streams",
        action="store_true",
        help="let sequences stream that no ring holds, or of which a ring is slower: in parts that "
        "keep only keys and values and are computed again in backward",
    )
    add(
        "--recompute",
        choices=("auto", "off"),
        default="off",
        help="auto recomputes sequences in backward, layer by layer, that no ring holds otherwise "
        "or that are faster so on fewer ranks (default: off)",
    )
    number(
        add,
        *("--effort", "K", 1, 10**6),
        "multiply the iterations of local search by this",
        default=1,
    )


def _add_items(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--encoder",
        choices=("qwen3-vl", "qwen2.5-vl", "clip-l-336", "siglip-so400m-384", "qwen2-audio"),
        default="qwen3-vl",
        help="that takes them: it says how they are resized and what they cost (default: qwen3-vl)",
    )
    add(
        "--media-balance",
        choices=("home", "replica", "micro-batch", "step"),
        default="step",
        help="home: the rank encodes that has the rows; replica: the ranks of a replica, by rows; "
        "micro-batch: all ranks, each micro-batch for itself; step: all ranks for the whole step, "
        "by cost, large items cut over ranks of a node (default: step)",
    )
    number(add, "--micro-batches", "M", 1, 2**20, "micro-batches of a rank in a step", default=8)
    number(add, "--replica-ranks", "R", 1, 2**20, "neighbouring ranks of a replica", default=8)
    number(
        add,
        *("--patches-per-pack", "P", 4, 2**40),
        "the most patches in a call of the encoder",
        default=65_536,
    )


def _add_results(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--output", metavar="FILE", help="write the plan as JSON")
    add(
        "--plot",
        metavar="FILE",
        help="draw the plan: a picture (.png, .svg, .pdf) or a page to explore (.html)",
    )
    add("--trace", metavar="FILE", help="write a trace for Perfetto or chrome://tracing (JSON)")
    add("--compare", action="store_true", help="plan with every strategy and print a table")


def _run(arguments: argparse.Namespace) -> int:
    _check_files(arguments)
    if arguments.items is not None:
        from megatron_hdp.cli import plan_items

        others = set(vars(arguments)).difference(_OF_ITEMS, _OF_BOTH, _NO_FLAGS)
        _refuse(arguments, others, "--items")
        return plan_items.run(arguments)
    _refuse(arguments, _OF_ITEMS, "--lengths")
    if arguments.tokens_per_rank is None:
        raise ValueError(
            "--tokens-per-rank: found none, expected a rank's capacity beside --lengths"
        )
    return _run_lengths(arguments)


def _refuse(arguments: argparse.Namespace, names: Iterable[str], beside: str) -> None:
    """Refuse flags that have no effect."""
    for name in sorted(names):
        if getattr(arguments, name) != arguments.default_of(name):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} has no effect on {beside}: leave it out")


def _run_lengths(arguments: argparse.Namespace) -> int:
    from megatron_hdp.cli import plan_outcomes, plan_text
    from megatron_hdp.cli.lengths import batch_of
    from megatron_hdp.cli.shared.models import (
        cost_model_of,
        exchanged_bytes,
        with_expert_share,
    )

    batch = batch_of(
        arguments.lengths,
        ranks=arguments.ranks,
        tokens_per_rank=arguments.tokens_per_rank,
        num_tokens=arguments.global_batch_tokens,
        max_length=arguments.max_length,
        seed=arguments.seed,
    )
    cost_model, costs_of = cost_model_of(arguments)
    if arguments.expert_share is not None:
        cost_model = with_expert_share(cost_model, arguments.expert_share)
    request = plan_outcomes.request_of(
        batch.lengths,
        ranks=arguments.ranks,
        tokens_per_rank=arguments.tokens_per_rank,
        cost_model=cost_model,
        max_length=batch.max_length,
        pipeline_stages=arguments.pipeline_stages,
        virtual_stages=arguments.virtual_stages,
        stage_weights=arguments.stage_weights,
        expert_parallel_size=arguments.expert_parallel_size,
        sequence_parts="auto" if arguments.sequence_parts is None else arguments.sequence_parts,
        offload=arguments.offload,
        host_memory_bytes=arguments.host_memory_gb and 1e9 * arguments.host_memory_gb,
        streams=arguments.streams,
        recompute=arguments.recompute,
        effort=arguments.effort,
    )
    for note in filter(None, (*batch.notes, cost_model.warning)):
        print(note)
    batch_line = plan_text.batch_line(request)  # its median is found while there is no plan yet
    chosen = plan_outcomes.evaluated(plan_outcomes.plan_with(arguments.strategy, request), request)
    print(batch_line)
    if arguments.compare:
        print(plan_text.comparison(plan_outcomes.compare(request, chosen)))
    else:
        sent = exchanged_bytes(arguments, int(batch.lengths.sum()))
        print(plan_text.summary(chosen, costs_of, sent))
    _write(arguments, chosen, request)
    return ExitCode.DONE


def _check_files(arguments: argparse.Namespace) -> None:
    """Refuse to write one file over another, or over what is read."""
    named = {
        flag: getattr(arguments, flag[2:].replace("-", "_"))
        for flag in (*_WRITTEN, "--lengths", "--items", "--model", "--cost-model", "--rank-speeds")
    }
    written = [(flag, named.pop(flag)) for flag in _WRITTEN]
    check_outputs(written, named.items())


def _write(arguments: argparse.Namespace, chosen: "Outcome", request: "Request") -> None:
    """Write the files that were asked for."""
    from megatron_hdp.files import new_file

    made = chosen.plan
    assert made is not None
    if arguments.output:
        with new_file(arguments.output, durable=False) as temporary:
            made.save(temporary)
        print(f"plan written to {arguments.output}")
    if not (arguments.plot or arguments.trace):
        return
    evaluation = request.evaluation_of(made)
    if arguments.plot:
        if arguments.plot.endswith(".html"):
            from megatron_hdp.simulator.plan_page import write_plan_page as draw
        else:
            from megatron_hdp.simulator.plot import plot_plan as draw
        draw(made, evaluation, arguments.plot)
        print(f"picture written to {arguments.plot}")
    if arguments.trace:
        from megatron_hdp.simulator.trace import write_trace

        per_node = request.cost_model.ranks_per_node
        write_trace(made, evaluation, arguments.trace, ranks_per_node=per_node)
        print(f"trace written to {arguments.trace}")
