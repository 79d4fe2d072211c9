"""``torchrun ... -m megatron_hdp run pretrain_gpt.py ...``: HDP in a stock Megatron-LM checkout."""

import os
import sys

from megatron_hdp import plugin
from megatron_hdp.options import OptionError

_USAGE = """usage: python -m megatron_hdp run SCRIPT [ARGUMENTS ...]

Runs a training script of a Megatron-LM checkout with the flags of hybrid data parallelism. All
arguments behind the script's path are the script's; its own --help lists HDP's too."""


def main(argv: list[str]) -> int:
    """Runs the script and returns 0; a mistake of the user's is one message and 2."""
    if argv[:1] in (["-h"], ["--help"]):
        print(_USAGE)
        return 0
    if len(argv) < 2 or argv[0] != "run":
        print(_USAGE, file=sys.stderr)
        return 2
    try:
        plugin.run(argv[1], argv[2:])
    except (OptionError, plugin.PluginError) as error:  # others keep their traceback
        if os.environ.get("RANK", "0") == "0":
            print(f"megatron_hdp: error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
