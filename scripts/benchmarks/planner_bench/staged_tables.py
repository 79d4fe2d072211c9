"""Markdown tables of pipelines: ours with each V, other strategies beside it, and a summary."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from planner_bench.cases import Case
from planner_bench.markdown import NOT_RUN, head, known, mark, mean_and_worst, notes, row
from planner_bench.staged import IN_PARTS, ON_PLAIN_RINGS, OURS, Staged, told_of

_WIDTH = 130  # of a page's lines

_PLANS_FOR_V = ("pp-balance", "ep-balance")

_OURS_NOTE = (
    "The makespan is the evaluator's; bound and target are those of the V. *Of the greater*: the "
    "greater of target and proven bound / makespan; *of the bound*: proven bound / makespan, 1 is "
    "optimal; both mean (worst) over the batches. *Efficiency*: total compute / ranks / P / "
    "makespan, mean. The target is max(total compute / ranks, the longest sequence alone) / P + "
    "(P - 1) / (P V) x a full single-rank micro-batch. *Time*: makespan with the one V / that with "
    "the other, mean. *ms*: planning, median of several runs, mean over the batches."
)
_BLIND_NOTE = (
    "Planned as without stages, then aligned with padding where micro-batches do not stand at one "
    "position on all of their ranks:"
)
_PARTS_NOTE = (
    "Efficiency (total compute / ranks / P / makespan), mean of the batches, with the V that is "
    "best for them. *Bound*: that of a plan which takes what no plan in so many parts can beat; "
    "*of the bound*: that time / makespan; *ms*: planning. In parts rings over nodes are double."
)
_SUMMARY_NOTE = (
    "*Row*: the mean of its batches. Where a strategy has no plan for a batch, its figures leave "
    "that batch out."
)


class StagedTables:
    """The tables of a run: each case is a row, each strategy with each V a column."""

    def __init__(
        self,
        cases: Sequence[Case],
        strategies: Sequence[str],
        virtual_stages: Sequence[int],
        results: Sequence[Staged],
    ) -> None:
        self._cases = cases
        self._others = [strategy for strategy in strategies if strategy != OURS]
        self._chunks = sorted(virtual_stages)
        self._best = self._chunks[-1]
        self._results = results
        self._by_cell: dict[tuple[str, str, int], list[Staged]] = {}
        for one in results:
            cell = one.case, one.strategy, one.virtual_stages
            self._by_cell.setdefault(cell, []).append(one)

    def __str__(self) -> str:
        lines = [*self._ours(), *(self._beside() if self._others else []), *self._summary()]
        if any(one.strategy == IN_PARTS for one in self._results):
            lines += self._side_by_side()
        return "\n".join([*lines, "", *notes(self._results)]).rstrip("\n")

    def _ours(self) -> Iterator[str]:
        first, *more = self._chunks
        names = ("of the greater", "of the bound", "efficiency")
        yield from _titled("Ours with each V", _OURS_NOTE)
        yield from head(
            [
                "batch",
                *(f"V = {chunks}: {name}" for chunks in self._chunks for name in names),
                *(f"time of V = {chunks} / V = {first}" for chunks in more),
                *(f"ms, V = {chunks}" for chunks in self._chunks),
            ]
        )
        for case in self._cases:
            shares, planning_ms = [], []
            for chunks in self._chunks:
                of = self._cell(case, OURS, chunks)
                shares += [
                    mean_and_worst(of, "of_the_greater"),
                    mean_and_worst(of, "of_the_bound"),
                    _number(fmean, known(of, "efficiency"), ".3f"),
                ]
                planning_ms.append(_number(fmean, known(of, "planning_ms"), ",.1f"))
            times = [self._times(case, OURS, chunks, first) for chunks in more]
            yield row(
                [case.name, *shares, *(_number(fmean, one, ".3f") for one in times), *planning_ms]
            )

    def _beside(self) -> Iterator[str]:
        columns = [(strategy, chunks) for strategy in self._others for chunks in self._chunks]
        yield from _titled("Other strategies", self._note_beside())
        yield from head(["batch", *(f"{strategy}, V = {chunks}" for strategy, chunks in columns)])
        for case in self._cases:
            yield row([case.name, *(self._cell_beside(case, *column) for column in columns)])

    def _cell_beside(self, case: Case, strategy: str, chunks: int) -> str:
        of = self._cell(case, strategy, chunks)
        times = self._times(case, strategy, chunks, self._best)
        if not times:
            return NOT_RUN
        return f"{fmean(times):.2f} ({fmean(known(of, 'of_the_greater')):.3f}){mark(of)}"

    def _note_beside(self) -> str:
        case = self._cases[0]
        pipelined, blind = [], []
        for strategy in self._others:
            told, _, _ = told_of(case, strategy, self._best)
            (pipelined if told.pipeline_stages > 1 else blind).append(f"*{strategy}*")
        for_v = [f"*{strategy}*" for strategy in self._others if strategy in _PLANS_FOR_V]
        aware = f"only {' and '.join(for_v)} plans" if for_v else "none of these plans"
        return " ".join(
            [
                f"Makespan / that of ours with V = {self._best}, mean; in parentheses the greater "
                "of target and proven bound of the column's V / makespan, mean. The column's V is "
                f"what a plan is judged with; {aware} for it.",
                *([f"Planned for P stages: {', '.join(pipelined)}."] if pipelined else []),
                *([f"{_BLIND_NOTE} {', '.join(blind)}."] if blind else []),
                *(["None is told of shared experts."] if case.expert_parallel_size > 1 else []),
            ]
        )

    def _summary(self) -> Iterator[str]:
        yield from _titled("Over all rows", _SUMMARY_NOTE)
        names = ["batches"]
        for figure in ("of the greater", "of the bound"):
            names += [f"{figure}: mean", "worst row", "worst batch"]
        names += [f"time / ours with V = {self._best}", "ms: mean", "worst row"]
        yield from head(["strategy", "V", *names])
        for strategy in [*self._others, OURS]:
            for chunks in self._chunks:
                yield row(self._summary_of(strategy, chunks))

    def _side_by_side(self) -> Iterator[str]:
        """Efficiency of all strategies, each with its best V, of ours in parts and of the bound."""
        yield from _titled("Whole and in parts", _PARTS_NOTE)
        whole = [*self._others, OURS]
        names = ["ours whole" if strategy == OURS else strategy for strategy in whole]
        ours = "ours in parts", "bound", "of the bound", "on plain rings", "ms"
        yield from head(["batch", *names, *ours])
        rows = []
        for case in self._cases:
            parts, plain = (self._best_cell(case, one) for one in (IN_PARTS, ON_PLAIN_RINGS))
            bounds = [one.perfect_s / one.bound_s for one in parts if one.perfect_s and one.bound_s]
            planned = [self._best_efficiency(case, strategy) for strategy in whole]
            figures = [known(parts, "efficiency"), bounds, known(parts, "of_the_bound")]
            figures += [known(plain, "efficiency"), known(parts, "planning_ms")]
            rows.append([*planned, *map(_mean, figures)])
            yield row([case.name, *_efficiencies(rows[-1])])
        columns = [[one for one in column if one is not None] for column in zip(*rows, strict=True)]
        yield row(["mean", *_efficiencies([_mean(one) for one in columns])])
        worst = [min(one, default=None) for one in columns[:-1]]
        yield row(["worst", *_efficiencies([*worst, max(columns[-1], default=None)])])

    def _best_efficiency(self, case: Case, strategy: str) -> float | None:
        return _mean(known(self._best_cell(case, strategy), "efficiency"))

    def _best_cell(self, case: Case, strategy: str) -> list[Staged]:
        """With the V that is best for the batches together."""
        cells = [self._cell(case, strategy, chunks) for chunks in self._chunks]
        return max(cells, key=lambda cell: _mean(known(cell, "efficiency")) or 0.0)

    def _summary_of(self, strategy: str, chunks: int) -> list[str]:
        rows = [self._cell(case, strategy, chunks) for case in self._cases]
        times = [self._times(case, strategy, chunks, self._best) for case in self._cases]
        planning_ms = _means(rows, "planning_ms")
        return [
            "ours" if strategy == OURS else strategy,
            str(chunks),
            str(sum(len(known(of, "makespan_s")) for of in rows)),
            *_spread(rows, "of_the_greater"),
            *_spread(rows, "of_the_bound"),
            _number(fmean, [time for of in times for time in of], ".2f"),
            _number(fmean, planning_ms, ",.1f"),
            _number(max, planning_ms, ",.1f"),
        ]

    def _cell(self, case: Case, strategy: str, chunks: int) -> list[Staged]:
        return self._by_cell.get((case.name, strategy, chunks), [])

    def _times(self, case: Case, strategy: str, chunks: int, of_ours: int) -> list[float]:
        """Makespans / those of ours with another V, of the batches that both have."""
        ours = {one.seed: one.makespan_s for one in self._cell(case, OURS, of_ours)}
        return [
            one.makespan_s / other
            for one in self._cell(case, strategy, chunks)
            if one.makespan_s is not None and (other := ours.get(one.seed))
        ]


def _titled(title: str, note: str) -> list[str]:
    return ["", textwrap.fill(f"**{title}.** {note}", _WIDTH, break_on_hyphens=False), ""]


def _number(pick: Callable[[list[float]], float], values: list[float], form: str) -> str:
    return format(pick(values), form) if values else NOT_RUN


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _efficiencies(figures: Sequence[float | None]) -> list[str]:
    """Cells of shares, the last of milliseconds."""
    forms = [*[".3f"] * (len(figures) - 1), ",.1f"]
    return [
        NOT_RUN if x is None else format(x, form) for x, form in zip(figures, forms, strict=True)
    ]


def _means(rows: Sequence[Sequence[Staged]], figure: str) -> list[float]:
    return [fmean(values) for of in rows if (values := known(of, figure))]


def _spread(rows: Sequence[Sequence[Staged]], figure: str) -> list[str]:
    """Mean of the rows, the worst of them, the worst batch."""
    means = _means(rows, figure)
    values = [value for of in rows for value in known(of, figure)]
    return [_number(fmean, means, ".3f"), _number(min, means, ".3f"), _number(min, values, ".3f")]
