"""``torchrun ... -m megatron_hdp run pretrain_gpt.py ...``: HDP in a stock Megatron-LM checkout."""

import os
import sys

from megatron_hdp import plugin
from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.options import OptionError
from megatron_hdp.processes import launcher

_USAGE = """usage: python -m megatron_hdp run SCRIPT [ARGUMENTS ...]

Runs a training script of a Megatron-LM checkout with the flags of hybrid data parallelism. All
arguments behind the script's path are the script's; its own --help lists HDP's too."""


def main(argv: list[str]) -> int:
    """Runs the script and returns the exit code; a mistake of the user's is one message."""
    if argv[:1] in (["-h"], ["--help"]):
        print(_USAGE)
        return ExitCode.DONE
    if len(argv) < 2 or argv[0] != "run":
        print(_USAGE, file=sys.stderr)
        return ExitCode.MISTAKE
    launcher.end_with_launcher()
    try:
        plugin.run(argv[1], argv[2:])
    except (OptionError, plugin.PluginError) as error:  # others keep their traceback
        if os.environ.get("RANK", "0") == "0":
            print(f"megatron_hdp: error: {error}", file=sys.stderr, flush=True)
        return ExitCode.MISTAKE
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
