"""``megatron-hdp data``: the flags of describe, plan, prepare and top."""

import argparse
import importlib
from dataclasses import fields

from megatron_hdp.cli.shared.numbers import number
from megatron_hdp.options import HdpOptions
from megatron_hdp.options.declaration import shown_help, switches

_MOST_TOKENS = 2**40
_CACHE = (
    "folder for tokenised sources and tables of sequences, as in training (default: hdp-cache next "
    "to the data; tables in memory)"
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand and those below it."""
    parser = subparsers.add_parser("data", help="describe, plan, prepare and watch data")
    below = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    _add_describe(below)
    _add_plan(below)
    _add_prepare(below)
    _add_top(below)


def _add_describe(below: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _added(below, "describe", "print tokens and lengths of each source")
    add = parser.add_argument
    add(
        "data",
        nargs="+",
        metavar="FILE.yaml|PREFIX",
        help="a file as for --hdp-data, prefixes of .bin/.idx pairs, or text files",
    )
    add(
        "--split",
        metavar="A,B,C",
        help="describe the training, validation and test parts of this --split (default: all "
        "documents)",
    )
    number(
        add,
        *("--max-length", "L", 1, _MOST_TOKENS),
        "context length; longer documents are truncated, or split if the source says so",
    )
    _add_text(parser)
    add("--json", action="store_true", help="print JSON instead of tables")


def _add_plan(below: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _added(below, "plan", "draw the steps of a run without training")
    parser.add_argument("data", metavar="FILE.yaml", help="a file as for --hdp-data")
    run = parser.add_argument_group("the run")
    add = run.add_argument
    number(add, "--steps", "N", 1, 10**9, "steps to draw", required=True)
    size = run.add_mutually_exclusive_group(required=True)
    number(
        size.add_argument,
        *("--hdp-global-batch-tokens", "T", 1, _MOST_TOKENS),
        "size of a step in tokens",
    )
    number(
        size.add_argument,
        *("--global-batch-size", "B", 1, _MOST_TOKENS),
        "size of a step in sequences",
    )
    number(
        add,
        *("--seq-length", "L", 1, _MOST_TOKENS),
        "context length of the run (default: the schedule's greatest max-length, or the longest "
        "document)",
    )
    add(
        "--items",
        metavar="FILE.txt",
        help="write the sizes of the steps' pictures, as plan --items and check --items read them",
    )
    add(
        "--hdp-long-sequence",
        choices=("error", "truncate", "split"),
        default="error",
        help="what to do with longer documents, unless the source says (default: error)",
    )
    number(add, "--seed", "S", 0, 2**31 - 1, "the run's seed", default=1234)
    (code,) = (one for one in fields(HdpOptions) if one.name == "hdp_primitives")
    add(switches(code)[1], dest=code.name, action="store_false", help=shown_help(code, bool))
    _add_text(parser)
    parser.add_argument(
        "--output",
        action="append",
        default=[],
        metavar="FILE.json",
        help="write all figures; may be repeated",
    )


def _add_prepare(below: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _added(below, "prepare", "tokenise sources to where a run finds them")
    parser.add_argument("data", metavar="FILE.yaml", help="a file as for --hdp-data")
    _add_text(parser)


def _add_top(below: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _added(below, "top", "watch the data planes on this host")
    add = parser.add_argument
    add("--once", action="store_true", help="print once, instead of every second until Ctrl-C")
    add("--json", action="store_true", help="print lines of JSON")


def _added(
    below: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, words: str
) -> argparse.ArgumentParser:
    """The parser of a command, which the module of its name runs."""

    def run(arguments: argparse.Namespace) -> int:
        module = importlib.import_module(f"megatron_hdp.cli.data_commands.{name}")
        return int(module.run(arguments))

    parser = below.add_parser(name, help=words)
    parser.set_defaults(run=run, subcommand=f"data {name}")
    return parser


def _add_text(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("text sources")
    add = group.add_argument
    add(
        "--tokenizer",
        default="byte",
        metavar="NAME",
        help="byte, hf:PATH or tiktoken:NAME, for sources without one (default: byte)",
    )
    number(
        add,
        *("--workers", "N", 1, 4096),
        "processes that tokenise (default: all CPUs of this process)",
    )
    add("--data-cache-path", metavar="DIR", help=_CACHE)
