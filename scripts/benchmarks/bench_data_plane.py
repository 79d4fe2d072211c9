"""What the data plane beside the ranks costs and hides: each figure beside its goal and its bound.

    python bench_data_plane.py memory      # of a node, against loaders in the ranks
    python bench_data_plane.py recovery    # loaders that are killed
    python bench_data_plane.py speed       # pictures, from loaders that sources share

Needs Ray. The machine's load is printed above each table: times of a busy machine are longer.
"""

import argparse
import sys

from plane_bench import memory, recovery, speed

COMMANDS = {
    "memory": (memory, "of a node, against loaders in the ranks"),
    "recovery": (recovery, "loaders that are killed"),
    "speed": (speed, "of pictures, from loaders that sources share"),
}


def main() -> int:
    """Run one measurement; return an exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, help_text) in COMMANDS.items():
        module.add_options(commands.add_parser(name, help=help_text))
    options = parser.parse_args()
    return COMMANDS[options.command][0].run(options)


if __name__ == "__main__":
    sys.exit(main())
