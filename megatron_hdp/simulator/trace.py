"""A plan as a Chrome trace, for Perfetto or chrome://tracing: a process a node, a thread a rank.

With pipeline stages there is a thread for each stage of a rank. Every micro-batch is one complete
event on the thread of each member, named by its degree (Perfetto colours by name); waiting is not
drawn. The file is written line by line, so that a plan for many thousand ranks needs no more memory
than its arrays.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson

from megatron_hdp.planner import Evaluation, Plan
from megatron_hdp.simulator.files import complete_file
from megatron_hdp.simulator.lanes import Int64Array, Lanes, lanes_of

_MAX_NAMED_SEQUENCES = 16


def write_trace(
    plan: Plan,
    evaluation: Evaluation,
    path: str | os.PathLike[str],
    *,
    ranks_per_node: int,
) -> None:
    """Write the trace of a plan; its times are microseconds with three decimals.

    Args:
        plan: what to write.
        evaluation: its times.
        path: the JSON file; written under another name and renamed when it is complete.
        ranks_per_node: ranks ``k * ranks_per_node`` and following share process k.

    Raises:
        ValueError: the evaluation belongs to another plan.
    """
    lanes = [lanes_of(plan, evaluation, stage) for stage in range(evaluation.pipeline_stages)]
    with complete_file(path) as temporary, open(temporary, "wb") as stream:
        stream.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = b""
        for event in _events(plan, lanes, ranks_per_node):
            stream.write(separator + orjson.dumps(event))
            separator = b",\n"
        stream.write(b"\n]}\n")


def _events(plan: Plan, lanes: list[Lanes], ranks_per_node: int) -> Iterator[dict[str, Any]]:
    details = _Details(plan)
    sorted_bars = [_by_rank(one, plan.num_ranks) for one in lanes]
    for rank in range(plan.num_ranks):
        node = rank // ranks_per_node
        if rank % ranks_per_node == 0:
            yield from _name("process", node, 0, f"node {node}", node)
        for stage, (bars, offsets) in enumerate(sorted_bars):
            thread = rank * len(lanes) + stage
            label = f"rank {rank}" + (f", stage {stage}" if len(lanes) > 1 else "")
            yield from _name("thread", node, thread, label, thread)
            for bar in bars[offsets[rank] : offsets[rank + 1]].tolist():
                yield _bar_event(details, lanes[stage], bar, node, thread, len(lanes) > 1)


def _by_rank(lanes: Lanes, num_ranks: int) -> tuple[Int64Array, Int64Array]:
    """The bars of every rank in the order of time, rank after rank, and where each rank's begin."""
    bars = np.lexsort((lanes.own_end_s, lanes.start_s, lanes.rank))
    counts = np.bincount(lanes.rank, minlength=num_ranks)
    return bars, np.concatenate([[0], np.cumsum(counts)])


def _name(kind: str, node: int, thread: int, label: str, position: int) -> Iterator[dict[str, Any]]:
    """What a viewer shows for a process or thread, and in which order."""
    for what, arguments in (("name", {"name": label}), ("sort_index", {"sort_index": position})):
        yield {
            "ph": "M",
            "name": f"{kind}_{what}",
            "pid": node,
            "tid": thread,
            "args": arguments,
        }


def _bar_event(
    details: "_Details", lanes: Lanes, bar: int, node: int, thread: int, pipelined: bool
) -> dict[str, Any]:
    # whole nanoseconds: neighbours that touch do not overlap by a rounding
    begin, end = round(float(lanes.start_s[bar]) * 1e9), round(float(lanes.own_end_s[bar]) * 1e9)
    name = f"degree {lanes.degree[bar]}"
    if pipelined:
        name += ", backward" if lanes.backward[bar] else ", forward"
    return {
        "ph": "X",
        "name": name,
        "pid": node,
        "tid": thread,
        "ts": begin / 1000,
        "dur": (end - begin) / 1000,
        "args": details.of(int(lanes.micro_batch[bar]), int(lanes.rank[bar])),
    }


class _Details:
    """What a viewer shows of a micro-batch when one clicks on it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._shared: dict[int, dict[str, Any]] = {}

    def of(self, m: int, rank: int) -> dict[str, Any]:
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
        }


def _first_of(sequences: Int64Array) -> str:
    """The ids as text, the first few of many."""
    text = ", ".join(map(str, sequences[:_MAX_NAMED_SEQUENCES].tolist()))
    return text + (", ..." if len(sequences) > _MAX_NAMED_SEQUENCES else "")
