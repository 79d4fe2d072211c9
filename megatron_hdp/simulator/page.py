"""A plan as a page to explore: one HTML file with zoom and details of every bar, and no network.

The plan's flat arrays go into the page as they are, so that one for thousands of ranks stays small
and quick; ``page.html`` draws what is in sight on a canvas.
"""

import os
from typing import Any

import numpy as np

from megatron_hdp.arrays import AnyArray
from megatron_hdp.planner import Evaluation, Plan
from megatron_hdp.simulator.filling import encoded, script_data, text_of, write_filled
from megatron_hdp.simulator.lanes import Chart, chart_of, default_title
from megatron_hdp.simulator.palette import IDLE, LOCAL, MAKESPAN, Palette, pale

_MAX_ROWS = 65_536  # more lanes show the first stage of each rank only


def write_page(
    plan: Plan,
    evaluation: Evaluation,
    path: str | os.PathLike[str],
    title: str | None = None,
) -> None:
    """Write a plan's page to ``path``.

    Args:
        plan: what to draw.
        evaluation: its times.
        path: the file; written under another name and renamed when it is complete.
        title: first line; the strategy and its efficiency if not given.

    Raises:
        ValueError: the evaluation belongs to something else.
    """
    chart = chart_of(plan, evaluation, _MAX_ROWS)
    document = _facts(plan, evaluation, chart, title or default_title(plan, evaluation))
    document["arrays"] = {name: encoded(array) for name, array in _arrays(plan, chart).items()}
    template = text_of("megatron_hdp.simulator", "page.html")
    write_filled(path, template, {"__PLAN__": script_data(document)})


def _facts(plan: Plan, evaluation: Evaluation, chart: Chart, title: str) -> dict[str, Any]:
    palette = Palette.of_degrees(chart.bars.degree, plan.num_ranks)
    pipelined = evaluation.pipeline_stages > 1
    of_chunks = f" of {evaluation.model_chunks} chunks" if evaluation.model_chunks > 1 else ""
    stages = f"{chart.stages_a_rank} stages{of_chunks} each"
    if chart.stages_a_rank == 1:
        stages = "first stage"
    return {
        "title": title,
        "makespan": evaluation.makespan_s,
        "bound": evaluation.lower_bound_s,
        "numRows": chart.num_rows,
        "stagesARank": chart.stages_a_rank,
        "pipelined": pipelined,
        "chunks": evaluation.model_chunks,
        "rowName": f"HDP rank ({stages})" if pipelined else "HDP rank",
        "idleName": f"idle {evaluation.idle_share:.1%}",
        "mostOfGroup": [most for _, most in palette.groups],
        "groupNames": palette.names,
        "colours": {
            "full": palette.colours,
            "pale": [pale(colour) for colour in palette.colours],
            "local": LOCAL,
            "idle": IDLE,
            "makespan": MAKESPAN,
        },
    }


def _arrays(plan: Plan, chart: Chart) -> dict[str, AnyArray]:
    bars = chart.bars
    return {
        "row": chart.row.astype(np.int32),
        "microBatch": bars.micro_batch.astype(np.int32),
        "start": bars.start_s,
        "ringEnd": bars.ring_end_s,
        "ownEnd": bars.own_end_s,
        "backward": bars.backward.astype(np.uint8),
        "chunk": bars.chunk.astype(np.int32),
        "rankOffsets": plan.rank_offsets.astype(np.int32),
        "ranks": plan.ranks,
        "sequenceOffsets": plan.sequence_offsets.astype(np.int32),
        "sequences": plan.sequences.astype(np.int32),
        "localOffsets": plan.local_offsets.astype(np.int32),
        "localSequences": plan.local_sequences.astype(np.int32),
        "localRanks": plan.local_ranks,
        "lengths": plan.lengths.astype(np.float64),
        "offload": plan.offload_ratios,
    }
