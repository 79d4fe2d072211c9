"""Chrome trace events, which Perfetto and chrome://tracing open, and the file they are written to.

Times are given in seconds and written in microseconds with three decimals.
"""

import os
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from megatron_hdp.arrays import Int64Array
from megatron_hdp.files import new_file
from megatron_hdp.planner import Plan

Event = dict[str, Any]

_MAX_NAMED_SEQUENCES = 16


def write_events(
    path: str | os.PathLike[str], events: Iterable[Event], about: dict[str, Any] | None = None
) -> None:
    """Write a trace as JSON, event by event in the order in which a viewer lists its threads.

    ``about`` holds facts on the whole file, which takes its name when it is complete.
    """
    with new_file(path, durable=False) as temporary, open(temporary, "wb") as stream:
        stream.write(b'{"displayTimeUnit": "ms", ')
        if about is not None:
            stream.write(b'"otherData": ' + orjson.dumps(about) + b", ")
        stream.write(b'"traceEvents": [\n')
        separator = b""
        for event in events:
            stream.write(separator + orjson.dumps(event))
            separator = b",\n"
        stream.write(b"\n]}\n")


def labels(kind: str, process: int, thread: int, label: str, position: int) -> Iterator[Event]:
    """What a viewer shows for a process or thread (the ``kind``), and in which order."""
    for what, arguments in (("name", {"name": label}), ("sort_index", {"sort_index": position})):
        yield {
            "ph": "M",
            "name": f"{kind}_{what}",
            "pid": process,
            "tid": thread,
            "args": arguments,
        }


def bar(
    name: str, process: int, thread: int, start_s: float, end_s: float, arguments: dict[str, Any]
) -> Event:
    """One stretch of time on a thread."""
    # whole nanoseconds: neighbours that touch do not overlap by a rounding
    begin, end = round(float(start_s) * 1e9), round(float(end_s) * 1e9)
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": begin / 1000,
        "dur": (end - begin) / 1000,
        "args": arguments,
    }


class MicroBatchDetails:
    """What a viewer shows of a micro-batch when one clicks on it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._shared: dict[int, dict[str, Any]] = {}

    def of(self, m: int, rank: int) -> dict[str, Any]:
        """Return the details of micro-batch ``m`` on one of its ranks."""
        plan = self._plan
        if m not in self._shared:
            self._shared[m] = self._of_ring(m)
        details = self._shared[m]
        span = slice(plan.local_offsets[m], plan.local_offsets[m + 1])
        mine = plan.local_sequences[span][plan.local_ranks[span] == rank]
        if not len(mine):
            return details
        return details | {
            "local_sequences": _first_of(mine),
            "local_tokens": int(plan.lengths[mine].sum()),
        }

    def _of_ring(self, m: int) -> dict[str, Any]:
        plan = self._plan
        sequences = plan.sequences[plan.sequence_offsets[m] : plan.sequence_offsets[m + 1]]
        return {
            "micro_batch": m,
            "degree": int(plan.rank_offsets[m + 1] - plan.rank_offsets[m]),
            "num_sequences": len(sequences),
            "sequences": _first_of(sequences),
            "tokens": int(plan.lengths[sequences].sum()),
            "offload_ratio": float(plan.offload_ratios[m]),
            "recomputed": bool(plan.is_recomputed[m]),
        }


def _first_of(sequences: Int64Array) -> str:
    """The ids as text, the first few of many."""
    text = ", ".join(map(str, sequences[:_MAX_NAMED_SEQUENCES].tolist()))
    return text + (", ..." if len(sequences) > _MAX_NAMED_SEQUENCES else "")
