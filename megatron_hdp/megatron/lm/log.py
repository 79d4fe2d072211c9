"""Adds to Megatron-LM's log: true numbers of operations, and the figures of HDP."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields

from megatron_hdp.megatron.parallel import say
from megatron_hdp.megatron.step import StepFigures, StepReport

Flops = Callable[[argparse.Namespace, int], float]


class LmLog:
    """The steps since the latest line of Megatron's log."""

    def __init__(self, args: argparse.Namespace, linear_share: float = 1.0) -> None:
        self._args = args  # Megatron's, validated
        self._linear_share = linear_share  # of the linear layers' operations, with frozen weights
        self._reports: list[StepReport] = []
        self.is_writing = False
        """True while Megatron writes a line."""

    @property
    def latest(self) -> StepReport | None:
        """The latest step, if there was one since the latest line."""
        return self._reports[-1] if self._reports else None

    def add(self, report: StepReport) -> None:
        """Notes a training step; one that the rerun machine runs again counts once."""
        if self._reports and self._reports[-1].position_after.key() == report.position_after.key():
            self._reports.pop()
        self._reports.append(report)

    def since_line(self) -> list[StepReport]:
        """The steps since the latest line, for `put_back`."""
        return list(self._reports)

    def put_back(self, reports: Sequence[StepReport]) -> None:
        """Goes back to what `since_line` gave."""
        self._reports = list(reports)

    def clear(self) -> None:
        """Megatron has written a line."""
        self._reports.clear()

    def flops(self, stock: Flops, batch_size: int) -> float:
        """Operations of the latest step, or in Megatron's log of the mean step since the last one.

        Before the first step `stock` counts, Megatron's function for sequences of equal length.
        """
        if not self._reports:
            return stock(self._args, batch_size)
        steps = self._reports if self.is_writing else self._reports[-1:]
        tokens = sum(one.tokens for one in steps) / len(steps)
        squared_tokens = sum(one.squared_tokens for one in steps) / len(steps)
        of_text = operations(stock, self._args, tokens, squared_tokens, self._linear_share)
        return of_text + sum(one.encoder_flop for one in steps) / len(steps)

    def write(
        self,
        iteration: int,
        scalars: Iterable[Callable[[str, float], None]],
        with_line: bool = True,
    ) -> None:
        """Writes the latest step's figures of HDP; `scalars` are Megatron's writers."""
        if (report := self.latest) is None:
            return
        shown = StepFigures(
            **{item.name: getattr(report, item.name) for item in fields(StepFigures)}
        )
        figures = shown.tagged()
        del figures["loss"]  # Megatron's
        for write in scalars:
            for name, value in figures.items():
                write(f"hdp/{name}", value)
        if with_line and iteration % self._args.log_interval == 0:
            say(hdp_line(iteration, report))


def operations(
    stock: Flops,
    args: argparse.Namespace,
    tokens: float,
    squared_tokens: float,
    linear_share: float = 1.0,
) -> float:
    """Megatron's formula for sequences of different lengths: it is ``a L + b L^2`` in the length.

    Args:
        stock: the formula, a function of arguments and number of sequences of ``seq_length``.
        args: Megatron's.
        tokens: sum of the sequences' lengths.
        squared_tokens: sum of their squares.
        linear_share: operations of linear layers, per those that the formula counts.
    """

    def of_one(length: int) -> float:
        return stock(argparse.Namespace(**{**vars(args), "seq_length": length}), 1)

    short, long = 1024, 2048
    squared = (of_one(long) / long - of_one(short) / short) / (long - short)
    linear = of_one(short) / short - squared * short
    return linear_share * linear * tokens + squared * squared_tokens


def hdp_line(iteration: int, report: StepReport) -> str:
    """The line of HDP's figures that follows Megatron's, which has the loss."""
    parts = report.log_parts(StepFigures, leave_out=("loss",))
    return f" hybrid data parallelism, iteration {iteration}: {' | '.join(parts)} |"
