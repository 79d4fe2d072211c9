"""``megatron-hdp data top``: what the data planes on this host are doing, again and again."""

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any

import orjson

from megatron_hdp.data_plane.watcher import Watcher
from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.simulator.units import aligned, short

_PAUSE_S = 1.0
_CLEAR = "\x1b[H\x1b[J"
NOTHING = (
    "no data plane of this user runs on this host: a run with --hdp-loaders ray, or with "
    "loaders: {backend: ray} in its file of --hdp-data, starts one on each node of its ranks"
)
_SOURCES = (
    *("split", "source", "serving", "standing by", "being started"),
    *("busy", "tokens/s", "MB"),
)
_NODES = (
    *("node", "split", "readers", "steps made", "steps ahead"),
    *("MB shared", "takeovers", "longest"),
)


def run(arguments: argparse.Namespace) -> int:
    """Print looks until nothing runs any more, or one alone."""
    watcher = Watcher()
    found = watcher.look()
    if arguments.once and found["planes"]:
        time.sleep(_PAUSE_S)  # rates are those between two looks
        found = watcher.look()
    while True:
        _show(found, arguments)
        if arguments.once or not (found["planes"] or found["starting"]):
            return ExitCode.DONE
        time.sleep(_PAUSE_S)
        found = watcher.look()


def report(found: Mapping[str, Any]) -> str:
    """Return what a look has found as tables."""
    parts = [_plane(name, one) for name, one in found["planes"].items()]
    parts += [f"being started; its log is {folder}/log" for folder in found["starting"]]
    return "\n\n".join(parts or [NOTHING])


def _show(found: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(orjson.dumps(found).decode(), flush=True)
        return
    clear = _CLEAR if sys.stdout.isatty() and not arguments.once else ""
    print(f"{clear}{report(found)}", flush=True)


def _plane(name: str, plane: Mapping[str, Any]) -> str:
    ages = [one["age_s"] for one in plane["nodes"].values()]
    title = f"{name}, as of {max(ages):.0f} s ago"
    planner = plane["planner"]
    if planner is None:
        title += ": planner and loaders are watched on the first node"
    else:
        ahead = ", ".join(f"{steps} of {split}" for split, steps in planner["steps_ahead"].items())
        title += f": planner of epoch {planner['epoch']}, steps planned ahead: {ahead or 'none'}"
    lines = [title]
    if plane["sources"]:
        lines += aligned([_SOURCES, *_source_rows(plane["sources"])], texts=(0, 1))
    return "\n".join([*lines, *aligned([_NODES, *_node_rows(plane["nodes"])], texts=(0, 1))])


def _source_rows(splits: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            *(split, source),
            "failed" if one["failed"] else str(one["serving"]),
            *(str(one[name]) for name in ("standing_by", "being_started")),
            "-" if one["busy_share"] is None else f"{one['busy_share']:.0%}",
            "-" if one["tokens_per_s"] is None else short(one["tokens_per_s"]),
            f"{one['rss_mb']:,.0f}",
        )
        for split, sources in splits.items()
        for source, one in sources.items()
    ]


def _megabytes(found: float) -> str:
    """A little is not nothing."""
    return "<0.1" if 0 < found < 0.05 else f"{found:,.1f}"


def _node_rows(nodes: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each split of a node; what is the whole node's stands in the first."""
    rows = []
    for node, one in nodes.items():
        of_node = (
            _megabytes(one["shared_mb"]),
            str(one["takeovers"]),
            f"{one['longest_takeover_s']:.1f} s" if one["takeovers"] else "-",
        )
        for split, its in one["splits"].items() or [("-", None)]:
            names = ("readers", "steps", "steps_ahead")
            figures = [f"{its[name]:,}" for name in names] if its else ["-"] * len(names)
            rows.append((node, split, *figures, *of_node))
            node, of_node = "", ("", "", "")
    return rows
