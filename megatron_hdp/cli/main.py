"""The ``megatron-hdp`` command: finds the subcommand and turns a user's mistake into one line.

Subcommand modules import only the standard library at their top; what they need to work is imported
when they run, so that help is immediate and planning never loads torch.
"""

import argparse
import sys
from collections.abc import Sequence

from megatron_hdp import __version__
from megatron_hdp.cli import check, doctor, plan, preprocess, verify
from megatron_hdp.exit_codes import ExitCode

_SUBCOMMANDS = (preprocess, plan, check, doctor, verify)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (ValueError, OSError, ImportError) as error:
        reason = " ".join(str(error).split())
        print(f"megatron-hdp {arguments.subcommand}: error: {reason}", file=sys.stderr)
        return ExitCode.MISTAKE
    except KeyboardInterrupt:
        print(f"megatron-hdp {arguments.subcommand}: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser, one of each subcommand below it."""
    parser = argparse.ArgumentParser(
        prog="megatron-hdp", description="Tools of hybrid data parallelism for Megatron-Core."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    for subcommand in _SUBCOMMANDS:
        subcommand.add_parser(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
