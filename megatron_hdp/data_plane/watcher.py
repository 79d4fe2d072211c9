"""What the data planes of this user on this host are doing, found in their nodes' status files.

Neither Ray nor a plane is asked, so looking disturbs nobody.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_hdp.data_plane.cluster.job_folder import folders_of_jobs
from megatron_hdp.data_plane.node_files import read_status

_MB = 1e6

_Who = tuple[str, str, str, int]  # plane, split, source, process


class Watcher:
    """Looks again and again; rates are those since the look before."""

    def __init__(self, parent: Path | None = None) -> None:
        """Look at what is in a folder; None: that of temporary files, where planes are."""
        self._parent = parent
        self._before: dict[_Who, Mapping[str, Any]] = {}
        self._rates: dict[_Who, tuple[float, float]] = {}

    def look(self) -> dict[str, Any]:
        """Return plain values: the time, planes by name, and folders of those that only start.

        Raises:
            ValueError: a status is none.
        """
        planes: dict[str, Any] = {}
        starting = []
        now = time.time()
        for folder in folders_of_jobs(self._parent, alive=True):
            status = read_status(folder)
            if status is None:
                starting.append(str(folder))
                continue
            try:
                self._add(planes, folder, status, now)
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{folder}/status.json: found a status without {error}, expected one of this "
                    "release: look with the release that the run uses"
                ) from None
        return {"time": now, "planes": planes, "starting": starting}

    def _add(
        self, planes: dict[str, Any], folder: Path, status: Mapping[str, Any], now: float
    ) -> None:
        name = status["plane"]
        plane = planes.setdefault(name, {"planner": None, "sources": {}, "nodes": {}})
        if "planner" in status:  # the first node's
            planner = status["planner"]
            failed = planner.get("failed", {})  # another release's may say nothing of it
            plane["planner"] = {"epoch": planner["epoch"], "steps_ahead": planner["steps_ahead"]}
            plane["sources"] = {
                split: {
                    source: {
                        "failed": failed.get(split, {}).get(source),
                        **self._source(name, split, source, one),
                    }
                    for source, one in its.items()
                }
                for split, its in status["sources"].items()
            }
        constructor = status["constructor"]
        plane["nodes"][str(status["node"])] = {
            "folder": str(folder),
            "age_s": now - status["time"],
            "shared_mb": constructor["segment_bytes"] / _MB,
            "rss_mb": constructor["rss_bytes"] / _MB,
            "takeovers": constructor["takeovers"],
            "longest_takeover_s": constructor["longest_takeover_s"],
            "splits": {
                split: {
                    "readers": one["readers"],
                    "steps": one["steps"],
                    "steps_ahead": one["steps_ahead"],
                    "fetched_mb": one["fetched_bytes"] / _MB,
                }
                for split, one in constructor["splits"].items()
            },
        }

    def _source(
        self, plane: str, split: str, source: str, found: Mapping[str, Any]
    ) -> dict[str, Any]:
        """One source's loaders: those that serve come first, those that are being started last."""
        opened: Sequence[Mapping[str, Any]] = [one for one in found["loaders"] if one]
        serving = opened[: max(found["wanted"], 1)]
        rates = [self._rate((plane, split, source, one["pid"]), one) for one in opened]
        known = [one for one in rates[: len(serving)] if one is not None]
        return {
            "serving": len(serving),
            "standing_by": len(opened) - len(serving),
            "being_started": len(found["loaders"]) - len(opened),
            "busy_share": sum(busy for busy, _ in known) / len(known) if known else None,
            "tokens_per_s": sum(rate[1] for rate in rates if rate) if known else None,
            "tokens": sum(one["tokens"] for one in opened),
            "rss_mb": sum(one["rss_bytes"] for one in opened) / _MB,
        }

    def _rate(self, who: _Who, now: Mapping[str, Any]) -> tuple[float, float] | None:
        """Return its busy share and tokens a second between the two latest looks at it."""
        before = self._before.get(who)
        if before is None:
            self._before[who] = now
        elif now["looked_s"] > before["looked_s"]:
            passed_s = now["looked_s"] - before["looked_s"]
            busy_s, tokens = now["busy_s"] - before["busy_s"], now["tokens"] - before["tokens"]
            self._rates[who] = busy_s / passed_s, tokens / passed_s
            self._before[who] = now
        return self._rates.get(who)
