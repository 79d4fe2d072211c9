"""How good plans are, as text: a short summary of one, a table of several."""

from collections.abc import Sequence

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.cli.plan_outcomes import Outcome, Request
from megatron_hdp.planner import Figures, Plan
from megatron_hdp.planner.flat_plan import pieces
from megatron_hdp.simulator.units import aligned, num_bytes, seconds, stages_of

_COLUMNS = (
    "strategy",
    "efficiency",
    "bound/makespan",
    "makespan",
    "ring traffic",
    "micro-batches",
    "per rank",
    "ring degrees",
    "planning",
)

_SAME = 1e-6  # relative difference of two bounds that are one


def batch_line(request: Request) -> str:
    """Return one line on what is planned for what."""
    lengths, pipeline = request.lengths, stages_of(request.pipeline, " and {} stages")
    return (
        f"{len(lengths):,} sequences, {lengths.sum():,} tokens "
        f"(median {int(np.median(lengths)):,}, longest {lengths.max():,}) "
        f"on {request.ranks:,} ranks of {request.tokens_per_rank:,} tokens{pipeline}"
    )


def summary(outcome: Outcome, costs_of: str, exchanged_bytes: float = 0.0) -> str:
    """Return a few aligned lines on one plan, and on what its cost model stands for.

    Of what all ranks send each other for experts there is a line if it is known, not 0.
    """
    made, evaluation = outcome.plan, outcome.evaluation
    assert made is not None and evaluation is not None
    rows = [
        ("strategy", made.strategy),
        ("cost model", costs_of),
        ("efficiency", f"{evaluation.efficiency:.3f}  ({_efficiency_formula(evaluation)})"),
        *_bound_rows(made, evaluation, outcome.proven_bound_s),
        ("makespan", seconds(evaluation.makespan_s)),
        ("idle", f"{evaluation.idle_share:.1%} of the ranks' time"),
        ("micro-batches", f"{made.num_micro_batches:,}  (a rank runs {_micro_batch_span(made)})"),
        *([("parts", _parts(made))] if made.num_parts is not None else []),
        *([("slots", _slots(made))] if "num_positions" in made.summary else []),
        ("ring degrees", _degree_counts(made)),
        ("ring traffic", num_bytes(evaluation.ring_bytes)),
        *([("all-to-all", num_bytes(exchanged_bytes))] if exchanged_bytes else []),
        ("fullest rank", f"{int(made.summary['max_tokens_on_a_rank']):,} tokens in a micro-batch"),
        *([("offloading", _offloading(made))] if made.offload_ratios.any() else []),
        *([("recomputing", _recomputing(made))] if made.recomputed is not None else []),
        ("planning", f"{made.summary['planning_ms']:.2f} ms"),
    ]
    lines = [f"  {name:<15} {value}" for name, value in rows]
    if outcome.problem:
        lines.append(f"  {outcome.problem}")
    return "\n".join(lines)


def comparison(outcomes: Sequence[Outcome]) -> str:
    """Return a table with one row a strategy; one that cannot plan the batch says why below."""
    rows: list[tuple[str, ...]] = [_COLUMNS]
    notes: list[str] = []
    for outcome in outcomes:
        if outcome.problem:
            notes.append(f"  {outcome.strategy}: {outcome.problem}")
        if outcome.plan is None or outcome.evaluation is None:
            rows.append((outcome.strategy, *["-"] * (len(_COLUMNS) - 1)))
            continue
        rows.append(_row(outcome.plan, outcome.evaluation))
    lines = aligned(rows)
    proven_s = max((outcome.proven_bound_s for outcome in outcomes), default=0.0)
    if proven_s:
        notes.append(f"  no plan takes less than {seconds(proven_s)}")
    return "\n".join(lines + notes)


def share(part_s: float, evaluation: Figures) -> float:
    """Return a time as a share of the makespan; 1 for a plan that takes no time."""
    return part_s / evaluation.makespan_s if evaluation.makespan_s else 1.0


def _efficiency_formula(evaluation: Figures) -> str:
    even = evaluation.total_speed == len(evaluation.busy_s)
    ranks = "ranks" if even else "sum of speeds"
    stages = " / stages" if evaluation.pipeline_stages > 1 else ""
    return f"total compute / {ranks}{stages} / makespan"


def _bound_rows(made: Plan, evaluation: Figures, proven_s: float) -> list[tuple[str, str]]:
    def row(name: str, part_s: float, what: str) -> tuple[str, str]:
        return name, f"{share(part_s, evaluation):.3f}  ({what} {seconds(part_s)})"

    bound_s = evaluation.lower_bound_s
    least = "no plan takes less than"
    rows = [row("bound/makespan", bound_s, least)]
    if proven_s > bound_s * (1 + _SAME):
        rows = [row("bound/makespan", bound_s, "bound"), row("proven/makespan", proven_s, least)]
    if evaluation.pipeline_stages > 1 and made.num_parts is None:  # of whole micro-batches
        target_s = evaluation.pipeline_bound_s
        rows.append(row("target/makespan", target_s, "equal micro-batches on full ranks take"))
    return rows


def _slots(made: Plan) -> str:
    padding = f"padding in {made.summary['padding_share']:.1%} of them"
    return f"{int(made.summary['num_positions']):,} at most, {padding}"


def _parts(made: Plan) -> str:
    parts = made.parts_of_each
    return f"{int((parts > 1).sum()):,} micro-batches pass the stages in up to {parts.max()} parts"


def _offloading(made: Plan) -> str:
    ratios = made.offload_ratios
    return f"{int((ratios > 0).sum()):,} micro-batches, ratio up to {ratios.max():.2f}"


def _recomputing(made: Plan) -> str:
    return f"{int(made.is_recomputed.sum()):,} micro-batches, in backward once more"


def _row(made: Plan, evaluation: Figures) -> tuple[str, ...]:
    degrees = np.flatnonzero(_counts_by_degree(made))
    return (
        made.strategy,
        f"{evaluation.efficiency:.3f}",
        f"{share(evaluation.lower_bound_s, evaluation):.3f}",
        seconds(evaluation.makespan_s),
        num_bytes(evaluation.ring_bytes),
        f"{made.num_micro_batches:,}",
        _micro_batch_span(made),
        _span(int(degrees.min()), int(degrees.max())),
        f"{made.summary['planning_ms']:.2f} ms",
    )


def _micro_batch_span(made: Plan) -> str:
    counts = np.zeros(made.num_ranks, dtype=np.int64)
    np.add.at(counts, made.ranks, 1)
    return _span(int(counts.min()), int(counts.max()))


def _span(least: int, most: int) -> str:
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _degree_counts(made: Plan) -> str:
    counts = _counts_by_degree(made)
    degrees = np.flatnonzero(counts)
    if len(degrees) > 8:
        return f"{len(degrees)} of them, {_span(int(degrees[0]), int(degrees[-1]))}"
    return ", ".join(f"{degree} ({counts[degree]:,} x)" for degree in degrees.tolist())


def _counts_by_degree(made: Plan) -> Int64Array:
    """How many micro-batches have each degree."""
    counts = np.zeros(made.num_ranks + 1, dtype=np.int64)
    for run in pieces(made.rank_offsets):
        np.add.at(counts, np.diff(made.rank_offsets[run.start : run.stop + 1]), 1)
    return counts
