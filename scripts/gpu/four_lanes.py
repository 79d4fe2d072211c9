"""A profiler's trace of one step on four lanes: compute, ring, to the host, from the host.

Reads what torch.profiler exports (Chrome's trace format, times in microseconds). Of a GPU, kernels
are told apart by category and name; where there is none, operators of the CPU stand for them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_hdp.simulator.palette import IDLE

COMPUTE, RING, D2H, H2D = LANES = ("compute", "ring", "to the host", "from the host")
SYNC = "gradient sync"
KINDS = (*LANES, SYNC)
COLOURS = dict(zip(KINDS, ("#1d91c0", "#f28e2b", "#253494", "#7fcdbb", "#7f7f7f"), strict=True))
_TRANSFERS = ("sendrecv", "send", "recv")
Event = dict[str, Any]
Spans = np.ndarray
"""Float64 ``[n, 2]``: start and end in milliseconds, ascending."""


@dataclass(frozen=True)
class Step:
    """What one rank's device did.

    Attributes:
        spans: by kind, one of `LANES` or `SYNC`; times count from the first of all.
        milliseconds: until the last end.
    """

    spans: dict[str, Spans]
    milliseconds: float

    def busy_ms(self, kind: str) -> float:
        """Milliseconds in which anything of a kind ran."""
        return float(np.diff(merged(self.spans[kind])).sum())

    def hidden_ms(self, kind: str) -> float:
        """Milliseconds of a kind that passed while the device computed."""
        mine, compute = merged(self.spans[kind]), merged(self.spans[COMPUTE])
        overlaps = (
            min(end, last) - max(start, first) for start, end in mine for first, last in compute
        )
        return float(sum(max(0.0, one) for one in overlaps))


def read(path: Path) -> Step:
    """Return the step of a trace.

    Raises:
        ValueError: it holds nothing that a device did.
    """
    events = json.loads(path.read_bytes())["traceEvents"]
    bars = [event for event in events if event.get("ph") == "X" and event.get("dur", 0) > 0]
    has_gpu = any(event.get("cat") == "kernel" for event in bars)
    kind_of = _kind_on_gpu if has_gpu else _kind_on_cpu
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for event in bars:
        kind = kind_of(event)
        if kind is not None:
            found[kind].append((event["ts"], event["ts"] + event["dur"]))
    if not found[COMPUTE]:
        raise ValueError(f"{path} has no kernels and no operators: was the step profiled?")
    first = min(start for spans in found.values() for start, _ in spans)
    last = max(end for spans in found.values() for _, end in spans)
    spans = {
        kind: (np.array(sorted(times), dtype=np.float64).reshape(-1, 2) - first) / 1e3
        for kind, times in found.items()
    }
    return Step(spans, (last - first) / 1e3)


def merged(spans: Spans) -> Spans:
    """Return `spans` with those that touch or overlap made one."""
    joined: list[list[float]] = []
    for start, end in spans.tolist():
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    return np.array(joined, dtype=np.float64).reshape(-1, 2)


def draw(step: Step, picture: Path, title: str) -> None:
    """Draw the lanes one below the other; gradient sync stands in the ring's."""
    figure = Figure(figsize=(13.0, 3.4), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    for row, lane in enumerate(LANES):
        for kind in (lane, SYNC) if lane == RING else (lane,):
            bars = [(start, end - start) for start, end in merged(step.spans[kind])]
            axes.broken_barh(bars, (row - 0.36, 0.72), facecolors=COLOURS[kind])
        if not len(step.spans[lane]):
            axes.text(step.milliseconds / 2, row, "nothing", ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(LANES)), LANES)
    axes.set_ylim(len(LANES) - 0.4, -0.6)
    axes.set_xlim(0, step.milliseconds)
    axes.set_xlabel("milliseconds")
    axes.set_facecolor(IDLE)
    shown = [kind for kind, spans in step.spans.items() if len(spans)]
    handles = [Patch(color=COLOURS[kind], label=kind) for kind in shown]
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0)}
    axes.legend(handles=handles, ncols=len(shown), fontsize=8, **place)
    axes.set_title(title, loc="left", fontsize=10)
    figure.savefig(picture)


def figures(step: Step) -> str:
    """Return one line: how long each lane was busy, and how much of it hidden by compute."""
    parts = [f"{step.milliseconds:.1f} ms, compute {step.busy_ms(COMPUTE):.1f} ms"]
    for lane in (RING, D2H, H2D):
        busy_ms = step.busy_ms(lane)
        hidden = f" ({step.hidden_ms(lane) / busy_ms:.0%} hidden)" if busy_ms else ""
        parts.append(f"{lane} {busy_ms:.1f} ms{hidden}")
    return ", ".join(parts)


def _kind_on_gpu(event: Event) -> str | None:
    category, name = event.get("cat"), event["name"].lower()
    if category == "gpu_memcpy":
        return D2H if "dtoh" in name else H2D if "htod" in name else COMPUTE
    if category == "gpu_memset":
        return COMPUTE
    if category != "kernel":
        return None
    if "nccl" in name:
        return RING if any(word in name for word in _TRANSFERS) else SYNC
    return COMPUTE


def _kind_on_cpu(event: Event) -> str | None:
    if event.get("cat") not in ("cpu_op", "user_annotation"):
        return None
    name = event["name"].lower()
    if name.startswith(("gloo:", "c10d::")):
        return RING if any(word in name for word in _TRANSFERS) else SYNC
    return COMPUTE if event["cat"] == "cpu_op" else None
