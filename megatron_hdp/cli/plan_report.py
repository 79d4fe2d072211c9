"""How good plans are, as text: a short summary of one, a table of several."""

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_hdp.planner import CostModel, Evaluation, Plan, evaluate, plan

_COLUMNS = (
    "strategy",
    "efficiency",
    "makespan",
    "ring traffic",
    "micro-batches",
    "per rank",
    "ring degrees",
    "planning",
)


def batch_line(made: Plan) -> str:
    """Return one line on what is planned for what."""
    return (
        f"{len(made.lengths):,} sequences, {made.lengths.sum():,} tokens "
        f"(median {int(np.median(made.lengths)):,}, longest {made.lengths.max():,}) "
        f"on {made.num_ranks:,} ranks of {made.tokens_per_rank:,} tokens"
    )


def summary(made: Plan, evaluation: Evaluation) -> str:
    """Return a few aligned lines on one plan."""
    rows = [
        ("strategy", made.strategy),
        ("efficiency", f"{evaluation.efficiency:.3f}  (total compute / ranks / makespan)"),
        (
            "makespan",
            f"{seconds(evaluation.makespan_s)}  (no plan is below "
            f"{seconds(evaluation.lower_bound_s)})",
        ),
        ("idle", f"{_idle_share(evaluation):.1%} of the ranks' time"),
        ("micro-batches", f"{made.num_micro_batches:,}  (a rank runs {_micro_batch_span(made)})"),
        ("ring degrees", _degree_counts(made)),
        ("ring traffic", num_bytes(evaluation.ring_bytes)),
        ("fullest rank", f"{int(made.summary['max_tokens_on_a_rank']):,} tokens in a micro-batch"),
        ("planning", f"{made.summary['planning_ms']:.2f} ms"),
    ]
    return "\n".join(f"  {name:<14} {value}" for name, value in rows)


def comparison(
    lengths: npt.NDArray[np.int64], strategies: tuple[str, ...], options: dict[str, Any]
) -> str:
    """Return a table with one row a strategy; one that cannot plan the batch says why below.

    Args:
        lengths: tokens of each sequence.
        strategies: names for :func:`megatron_hdp.planner.plan`.
        options: its other arguments, the cost model among them.
    """
    cost_model: CostModel = options["cost_model"]
    rows: list[tuple[str, ...]] = [_COLUMNS]
    refusals: list[str] = []
    planned: set[str] = set()
    bound_s = 0.0
    for strategy in strategies:
        try:
            made = plan(lengths, strategy=strategy, **options)
        except ValueError as error:
            rows.append((strategy, *["-"] * (len(_COLUMNS) - 1)))
            refusals.append(f"  {strategy}: {error}")
            continue
        if made.strategy in planned:  # "auto" chose one that has its row
            continue
        planned.add(made.strategy)
        evaluation = evaluate(made, cost_model)
        bound_s = evaluation.lower_bound_s
        rows.append(_row(made, evaluation))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_aligned(row, widths) for row in rows]
    if bound_s:
        refusals.append(f"  no plan takes less than {seconds(bound_s)}")
    return "\n".join(lines + refusals)


def seconds(value: float) -> str:
    """Return a duration in the unit that keeps it readable."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3f} {unit}"
    return f"{value * 1e6:.3f} us"


def num_bytes(value: float) -> str:
    """Return a size in decimal units."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.2f} {unit}"
    return f"{value:.0f} B"


def _row(made: Plan, evaluation: Evaluation) -> tuple[str, ...]:
    degrees = np.diff(made.rank_offsets)
    return (
        made.strategy,
        f"{evaluation.efficiency:.3f}",
        seconds(evaluation.makespan_s),
        num_bytes(evaluation.ring_bytes),
        f"{made.num_micro_batches:,}",
        _micro_batch_span(made),
        _span(int(degrees.min()), int(degrees.max())),
        f"{made.summary['planning_ms']:.2f} ms",
    )


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    figures = map(str.rjust, row[1:], widths[1:])
    return "  " + "  ".join([row[0].ljust(widths[0]), *figures])


def _idle_share(evaluation: Evaluation) -> float:
    whole = evaluation.makespan_s * len(evaluation.busy_s)
    return 1.0 - float(evaluation.busy_s.sum()) / whole if whole else 0.0


def _micro_batch_span(made: Plan) -> str:
    counts = np.bincount(made.ranks, minlength=made.num_ranks)
    return _span(int(counts.min()), int(counts.max()))


def _span(least: int, most: int) -> str:
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _degree_counts(made: Plan) -> str:
    degrees, counts = np.unique(np.diff(made.rank_offsets), return_counts=True)
    if len(degrees) > 8:
        return f"{len(degrees)} of them, {_span(int(degrees[0]), int(degrees[-1]))}"
    pairs = zip(degrees.tolist(), counts.tolist(), strict=True)
    return ", ".join(f"{degree} ({count:,} x)" for degree, count in pairs)
