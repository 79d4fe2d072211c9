"""What the remote data plane costs and hides: each figure beside its goal and its bound.

    python bench_data_plane.py memory      # of a node, against loaders in the ranks
    python bench_data_plane.py wait        # steps with slow preprocessing, in training
    python bench_data_plane.py bytes       # that a node fetches, against its slices
    python bench_data_plane.py planner     # a step of 4,096 ranks and 60,000 sequences
    python bench_data_plane.py start       # until the first step
    python bench_data_plane.py recovery    # loaders that are killed
    python bench_data_plane.py kills       # effective training time while all is killed

Needs Ray. The machine's load stands above each table: times on a busy one are those of a busy one.
"""

import argparse
import importlib
import sys

COMMANDS = {
    "memory": "of a node, against loaders in the ranks",
    "wait": "steps with slow preprocessing, in training",
    "bytes": "that a node fetches, against its slices",
    "planner": "a step of many ranks and sequences",
    "start": "until the first step",
    "recovery": "loaders that are killed",
    "kills": "effective training time while all is killed",
}


def main() -> int:
    """Run one measurement; return an exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in COMMANDS.items():
        module = importlib.import_module(f"plane_bench.{_module(name)}")
        module.add_options(commands.add_parser(name, help=help_text))
    options = parser.parse_args()
    run = importlib.import_module(f"plane_bench.{_module(options.command)}").run
    code: int = run(options)
    return code


def _module(name: str) -> str:
    return f"{name}_bench" if name in ("bytes",) else name


if __name__ == "__main__":
    sys.exit(main())
