"""``torchrun ... -m megatron_hdp.profile``: a cost model measured on the ranks of a job."""

import argparse
import os
import sys
import traceback
from typing import NoReturn

from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.processes import launcher
from megatron_hdp.profile.command import add_flags, arguments_of, is_first_rank, profile_of


def main(argv: list[str] | None = None) -> int:
    """Profiles and returns the exit code.

    A mistake of the user's that every rank sees before they meet is told by the first rank only.
    """
    parser = argparse.ArgumentParser(
        prog="megatron_hdp.profile",
        allow_abbrev=False,
        description="Measures a cost model. All other flags are those of training, --config first.",
    )
    add_flags(parser)
    own, training = parser.parse_known_args(argv)
    try:
        arguments = arguments_of(own, training)
    except (ValueError, ImportError) as error:
        if is_first_rank():
            _say(f"error: {error}")
        return ExitCode.MISTAKE
    try:
        profile_of(own, arguments)
    except ValueError as error:
        _say(f"error on rank {os.environ.get('RANK', '0')}: {error}")
        return ExitCode.MISTAKE
    return ExitCode.DONE


def run() -> NoReturn:
    """Runs `main` and ends this process: one that failed at once, without waiting for others."""
    launcher.end_with_launcher()
    try:
        code = main()
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    except Exception as error:
        lines = "".join(traceback.format_exception(error)).splitlines(keepends=True)
        rank = os.environ.get("RANK", "0")
        sys.stderr.write("".join(f"[rank{rank}]: {line}" for line in lines))
        code = ExitCode.FAILED
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(ExitCode.DONE)


def _say(text: str) -> None:
    print(f"profile: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run()
