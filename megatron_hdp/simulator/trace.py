"""A plan as a Chrome trace, for Perfetto or chrome://tracing: a process a node, a thread a rank.

With pipeline stages there is a thread for each stage of a rank, with several model chunks (virtual
stages) one for each chunk of it. Every micro-batch is one complete event on the thread of each
member, named by its degree (Perfetto colours by name); waiting is not drawn. The file is written
line by line, so that a plan for many thousand ranks needs no more memory than its arrays.
"""

import os
from collections.abc import Iterator

from megatron_hdp.planner import Evaluation, Plan
from megatron_hdp.simulator.plan_bars import Lanes, bars_by_rank, lanes_of, of_chunk
from megatron_hdp.simulator.trace_events import Event, MicroBatchDetails, bar, labels, write_events


def write_trace(
    plan: Plan,
    evaluation: Evaluation,
    path: str | os.PathLike[str],
    *,
    ranks_per_node: int,
) -> None:
    """Write the trace of a plan to ``path``, a JSON file.

    Times are microseconds with three decimals; ranks ``k * ranks_per_node`` and following share
    process k.

    Raises:
        ValueError: the evaluation belongs to another plan.
    """
    stages, chunks = evaluation.pipeline_stages, evaluation.model_chunks
    lanes = {
        (f", stage {stage}" if stages > 1 else "")
        + (f", chunk {chunk}" if chunks > 1 else ""): of_chunk(of_stage, chunk)
        for stage in range(stages)
        for of_stage in [lanes_of(plan, evaluation, stage)]
        for chunk in range(chunks)
    }
    write_events(path, _events(plan, lanes, ranks_per_node))


def _events(plan: Plan, lanes: dict[str, Lanes], ranks_per_node: int) -> Iterator[Event]:
    """All events; lanes are those of a rank, by what follows its name."""
    details = MicroBatchDetails(plan)
    sorted_bars = [bars_by_rank(one, plan.num_ranks) for one in lanes.values()]
    for rank in range(plan.num_ranks):
        node = rank // ranks_per_node
        if rank % ranks_per_node == 0:
            yield from labels("process", node, 0, f"node {node}", node)
        for number, (place, one) in enumerate(lanes.items()):
            bars, offsets = sorted_bars[number]
            thread = rank * len(lanes) + number
            yield from labels("thread", node, thread, f"rank {rank}{place}", thread)
            for i in bars[offsets[rank] : offsets[rank + 1]].tolist():
                arguments = details.of(int(one.micro_batch[i]), rank)
                if plan.parts_of_each[one.micro_batch[i]] > 1:
                    arguments = arguments | {"part": int(one.part[i])}
                name = f"degree {one.degree[i]}"
                if len(lanes) > 1:
                    name += ", backward" if one.backward[i] else ", forward"
                yield bar(name, node, thread, one.start_s[i], one.own_end_s[i], arguments)
