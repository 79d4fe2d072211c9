"""A plan as a page to explore, with details of every bar.

The plan's flat arrays go into the page as they are, so that a plan for thousands of ranks stays
small and quick.
"""

import os
from html import escape

import numpy as np

from megatron_hdp.planner import Evaluation, Plan
from megatron_hdp.simulator.page import WAITING, bars_on_page, encoded, write_page
from megatron_hdp.simulator.palette import LOCAL, MAKESPAN, Palette, pale
from megatron_hdp.simulator.plan_bars import chart_of, default_title
from megatron_hdp.simulator.units import seconds

_ARRAYS = ("micro_batch", "degree", "start_s", "backward", "chunk")
_OF_PLAN = (
    *("rank_offsets", "ranks", "sequence_offsets", "sequences"),
    *("local_offsets", "local_sequences", "local_ranks", "offload_ratios"),
)
_MAX_ROWS = 65_536  # more lanes show the first stage of each rank only


def write_plan_page(
    plan: Plan,
    evaluation: Evaluation,
    path: str | os.PathLike[str],
    title: str | None = None,
) -> None:
    """Write a plan's page to ``path``; the title is by default the strategy and its efficiency.

    Raises:
        ValueError: the evaluation belongs to something else.
    """
    chart = chart_of(plan, evaluation, _MAX_ROWS)
    bars, title = chart.bars, title or default_title(plan, evaluation)
    order = np.lexsort((bars.start_s, chart.row))
    palette = Palette.of_degrees(bars.degree, plan.num_ranks)
    makespan_s, bound_s = evaluation.makespan_s, evaluation.lower_bound_s
    arrays = {
        **{name: getattr(bars, name) for name in _ARRAYS},
        "row": chart.row,
        "busy_s": bars.ring_end_s - bars.start_s,
        "end_s": bars.own_end_s,
    }
    of_plan = {name: getattr(plan, name) for name in _OF_PLAN}
    gantt = {
        "name": "",
        "rows": chart.num_rows,
        "stages": chart.stages_a_rank,
        "chunks": evaluation.model_chunks,
        "makespan": makespan_s,
        "step": makespan_s,
        "limits": [(makespan_s, MAKESPAN, []), (bound_s, "#888", [6, 4])],
        "behind": [],
        "arrays": encoded({name: array[order] for name, array in arrays.items()}),
        "plan": encoded({**of_plan, "lengths": plan.lengths.astype(np.float64)}),
    }
    legend = [(f"idle {evaluation.idle_share:.1%}", WAITING[1])]
    if len(plan.local_sequences):
        legend.append(("local: whole sequences on a ring member", LOCAL))
    if evaluation.pipeline_stages > 1:
        legend.append(("a forward is paler than its backward", pale(palette.colours[-1])))
    legend += [
        (f"makespan {seconds(makespan_s)}", MAKESPAN),
        (f"lower bound {seconds(bound_s)}", "#888"),
    ]
    stages = evaluation.pipeline_stages
    rows = f"A rank has a row for each of its {stages} stages. "
    if chart.stages_a_rank < stages:
        rows = f"Only the first of {stages} stages of each rank is shown. "
    note = rows if stages > 1 else "A row is a rank."
    window_s = makespan_s * 1.01 or 1.0
    drawn = bars_on_page([gantt], palette, window_s, note=note, legend=legend, local=LOCAL)
    body = f'<h1>{escape(title)}</h1>\n<section id="bars"></section>'
    write_page(path, title, body, {"charts": {}, "bars": drawn})
