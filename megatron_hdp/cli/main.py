"""The ``megatron-hdp`` command: finds the subcommand and turns a user's mistake into one line.

Subcommand modules import only the standard library at their top; what they need to work is imported
when they run, so that help is immediate and planning never loads torch.
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_hdp import __version__
from megatron_hdp.cli import (
    check,
    convert,
    doctor,
    launch,
    plan,
    preprocess,
    profile,
    simulate,
    verify,
)
from megatron_hdp.cli.data_commands import command as data
from megatron_hdp.exit_codes import ExitCode

_SUBCOMMANDS = (preprocess, data, plan, simulate, profile, check, convert, doctor, verify, launch)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # here, where a reader who has gone away can be met
    except BrokenPipeError:
        # what is left in the buffer would fail again when the interpreter ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.UNREAD


def _run(argv: Sequence[str] | None) -> int:
    arguments = build_parser().parse_args(argv)
    try:
        with _ends_by_signals():
            return int(arguments.run(arguments))
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError) as error:
        reason = " ".join(str(error).split())
        print(f"megatron-hdp {arguments.subcommand}: error: {reason}", file=sys.stderr)
        return ExitCode.MISTAKE
    except KeyboardInterrupt:
        print(f"megatron-hdp {arguments.subcommand}: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED


@contextmanager
def _ends_by_signals() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP do what Ctrl-C does, so that nothing half is left."""
    numbers = [signal.SIGTERM, signal.SIGHUP]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # Python hears signals there alone
    changed = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


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
