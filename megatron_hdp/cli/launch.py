"""``megatron-hdp launch``: starts the ranks of a job, and others for those it loses."""

import argparse
from typing import Any

_DESCRIPTION = """\
Starts ranks as torchrun does, by the same flags and with the same environment. Ranks that run with
--hdp-survive continue when one of them dies: its place is taken by a new process. Without that flag
the job ends with its first rank that fails."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "launch",
        help="start the ranks of a job, which survive the loss of some",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--nproc-per-node", type=_count, required=True, metavar="N", help="ranks of this node"
    )
    parser.add_argument(
        "--master-port",
        type=int,
        default=0,
        metavar="PORT",
        help="where the job's store listens (default: a free port)",
    )
    parser.add_argument(
        "--max-replacements",
        type=int,
        default=100,
        metavar="N",
        help="processes started in the place of lost ones, over the whole job (default: 100)",
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="the program is a module, not a script"
    )
    parser.add_argument("program", metavar="PROGRAM", help="what each rank runs")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="its arguments")
    parser.set_defaults(run=_run)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"found {number}, expected at least 1")
    return number


def _run(arguments: argparse.Namespace) -> int:
    from megatron_hdp.launching import Agent, LaunchPlan, command_of

    plan = LaunchPlan(
        command=command_of([arguments.program, *arguments.rest], arguments.module),
        num_ranks=arguments.nproc_per_node,
        address="127.0.0.1",
        port=arguments.master_port,
        max_replacements=arguments.max_replacements,
    )
    return Agent(plan).run()
