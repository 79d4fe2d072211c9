"""``megatron-hdp doctor``: what is installed, what would be patched, what would not work."""

import argparse


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser("doctor", help="show versions, patches and missing packages")
    parser.add_argument("--json", action="store_true", help="print one JSON object for tools")
    parser.add_argument(
        "--clean-up",
        action="store_true",
        help="remove what data planes of dead jobs have left on this host",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from megatron_hdp.megatron.doctor import run_doctor

    return int(run_doctor(arguments.json, arguments.clean_up))
