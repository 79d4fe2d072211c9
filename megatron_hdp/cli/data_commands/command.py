"""``megatron-hdp data``: describes data, plans a run, makes text ready, watches, tidies up."""

import argparse
from collections.abc import Callable

from megatron_hdp.cli.shared.numbers import whole
from megatron_hdp.cli.shared.ranks import add_ranks

_MOST_TOKENS = 2**40
_CACHE = (
    "folder of what sources are tokenised into and of tables of sequences, as in training "
    "(default: hdp-cache beside the data; tables in memory)"
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand and those below it."""
    parser = subparsers.add_parser("data", help="describe, plan, prepare, watch data")
    below = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    _add_describe(below)
    _add_plan(below)
    _add_prepare(below)
    _add_top(below)


def _add_describe(below: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _added(below, "describe", "print tokens and lengths of each source", _describe)
    add = parser.add_argument
    add(
        "data",
        nargs="+",
        metavar="FILE.yaml|PREFIX",
        help="file of --hdp-data, or prefixes of .bin/.idx pairs, or files of text",
    )
    add(
        "--split",
        metavar="A,B,C",
        help="describe what this --split trains, validates and tests on (default: all documents)",
    )
    add(
        "--max-length",
        type=whole(1, _MOST_TOKENS),
        metavar="L",
        help="context length; longer documents are split where the source says so, else truncated",
    )
    _add_text(parser)
    _add_output(parser, "write a picture (.png, .svg, .pdf) or a page (.html); may be repeated")
    add("--json", action="store_true", help="print JSON instead of tables")


def _add_plan(below: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _added(below, "plan", "draw a run's steps without training them", _plan)
    parser.add_argument("data", metavar="FILE.yaml", help="file of --hdp-data")
    run = parser.add_argument_group("the run")
    add = run.add_argument
    add("--steps", type=whole(1, 10**9), required=True, metavar="N", help="steps to draw")
    size = run.add_mutually_exclusive_group(required=True)
    size.add_argument(
        "--hdp-global-batch-tokens",
        type=whole(1, _MOST_TOKENS),
        metavar="T",
        help="size of a step in tokens",
    )
    size.add_argument(
        "--global-batch-size",
        type=whole(1, _MOST_TOKENS),
        metavar="B",
        help="size of a step in sequences",
    )
    add(
        "--seq-length",
        type=whole(1, _MOST_TOKENS),
        metavar="L",
        help="the run's (default: the schedule's greatest max-length, or the longest document)",
    )
    add(
        "--hdp-long-sequence",
        choices=("error", "truncate", "split"),
        default="error",
        help="what to do with longer documents of sources that say nothing (default: error)",
    )
    add(
        "--seed",
        type=whole(0, 2**31 - 1),
        default=1234,
        metavar="S",
        help="the run's seed (default: 1234)",
    )
    _add_text(parser)
    add_ranks(parser.add_argument_group("ranks, for an estimate of efficiency"), required=False)
    _add_output(
        parser,
        "write all figures (.json), a picture (.png, .svg, .pdf) or a page (.html); may be "
        "repeated",
    )


def _add_prepare(below: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _added(below, "prepare", "tokenise sources where a run finds them", _prepare)
    parser.add_argument("data", metavar="FILE.yaml", help="file of --hdp-data")
    _add_text(parser)


def _add_top(below: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _added(below, "top", "watch the data planes that run on this host", _top)
    add = parser.add_argument
    add("--once", action="store_true", help="look once, instead of each second until Ctrl-C")
    add("--json", action="store_true", help="print each look as a line of JSON")


def _added(
    below: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    words: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = below.add_parser(name, help=words)
    parser.set_defaults(run=run, subcommand=f"data {name}")
    return parser


def _add_text(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sources that are not tokenised")
    add = group.add_argument
    add(
        "--tokenizer",
        default="byte",
        metavar="NAME",
        help="byte, hf:PATH or tiktoken:NAME, for sources that name none (default: byte)",
    )
    add(
        "--workers",
        type=whole(1, 4096),
        metavar="N",
        help="processes that tokenise (default: the CPUs that this one may use)",
    )
    add("--data-cache-path", metavar="DIR", help=_CACHE)


def _add_output(parser: argparse.ArgumentParser, words: str) -> None:
    parser.add_argument("--output", action="append", default=[], metavar="FILE", help=words)


def _describe(arguments: argparse.Namespace) -> int:
    from megatron_hdp.cli.data_commands.describe import run

    return run(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    from megatron_hdp.cli.data_commands.plan import run

    return run(arguments)


def _prepare(arguments: argparse.Namespace) -> int:
    from megatron_hdp.cli.data_commands.prepare import run

    return run(arguments)


def _top(arguments: argparse.Namespace) -> int:
    from megatron_hdp.cli.data_commands.top import run

    return run(arguments)
