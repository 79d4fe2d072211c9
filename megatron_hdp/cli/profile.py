"""``megatron-hdp profile``: a cost model measured on this machine, by one process."""

import argparse

from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.profile.command import add_flags, arguments_of, profile_of


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "profile",
        help="measure a cost model on this machine",
        description="Runs the layers of a configuration and fits a cost model to their times. One "
        "process measures no rings; for several, torchrun ... -m megatron_hdp.profile takes the "
        "same flags.",
    )
    parser.add_argument(
        "--config",
        action="append",
        required=True,
        metavar="FILE",
        help="YAML file of training's flags; later files win",
    )
    add_flags(parser)
    parser.add_argument(
        "flags",
        nargs="*",
        metavar="-- FLAGS",
        help="flags of training after --; they win over the files",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    configs = [text for path in arguments.config for text in ("--config", path)]
    profile_of(arguments, arguments_of(arguments, [*configs, *arguments.flags]))
    return ExitCode.DONE
