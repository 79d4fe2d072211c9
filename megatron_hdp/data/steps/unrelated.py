"""Answers behind prompts of others: of each step of preferences, a step of as many sequences.

Its sequence ``i`` is the prompt of sequence ``i`` and the answer of the row before it in the step,
of the first one that of the last. A prompt is all that stands before the first trained token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megatron_hdp.arrays import BoolArray, Int64Array
from megatron_hdp.data.mixture import Corpus, Position, Step
from megatron_hdp.data.steps.planning import StepPlanner


@dataclass(frozen=True)
class _Side:
    """A row whose prompt or answer is taken."""

    source: int
    row: int
    length: int
    prompt: int
    """Tokens before its answer."""


class UnrelatedCorpus(Corpus):
    """A corpus whose rows are prompts and answers of two rows of another one."""

    def __init__(self, corpus: Corpus, max_length: int) -> None:
        """Take an opened corpus of preferences."""
        super().__init__(corpus.spec, corpus.sources, max_length)
        first = np.cumsum([0, *(one.num_rows for one in corpus.sources)])
        self._first, self._num_rows = first[:-1], int(first[-1])

    def of(self, step: Step) -> Step:
        """Return the sequences of a step; what is longer than the step allows is cut at its end.

        A row stands for two: that of its prompt, and that of its answer.
        """
        answers = np.roll(self._first[step.sources] + step.rows, self.group)
        rows = step.rows * self._num_rows + answers
        lengths, trained = [], []
        for source, row in zip(step.sources.tolist(), rows.tolist(), strict=True):
            prompt, answer = self._sides(source, row)
            whole = prompt.prompt + answer.length - answer.prompt
            lengths.append(min(whole, step.max_length))
            trained.append(int(self.is_trained(source, row, 0, lengths[-1] - 1).sum()))
        return replace(
            step,
            rows=rows,
            lengths=np.array(lengths),
            num_labels=np.array(lengths) - 1,
            num_loss_tokens=np.array(trained),
        )

    def tokens(self, source: int, row: int, start: int, count: int) -> Int64Array:
        """Return tokens of a row from its token ``start`` on."""
        prompt, answer = self._sides(source, row)
        border = min(max(prompt.prompt - start, 0), count)
        found = []
        if border:
            found.append(super().tokens(prompt.source, prompt.row, start, border))
        if border < count:
            first = answer.prompt + start + border - prompt.prompt
            found.append(super().tokens(answer.source, answer.row, first, count - border))
        return np.concatenate(found)

    def is_trained(self, source: int, row: int, start: int, stop: int) -> BoolArray:
        """Return which of the labelled tokens ``[start, stop)`` of a row carry loss."""
        prompt, answer = self._sides(source, row)
        border = min(max(prompt.prompt - 1, start), stop)  # its label is the answer's first token
        found = np.zeros(stop - start, dtype=np.bool_)
        if border < stop:
            first, last = (one + answer.prompt - prompt.prompt for one in (border, stop))
            found[border - start :] = super().is_trained(answer.source, answer.row, first, last)
        return found

    def documents(self, step: Step) -> Int64Array:
        """Return source and document of the prompt, then of the answer, ``[n, 4]``."""
        found = [
            [
                number
                for one, of in self._rows(*both)
                for number in (one, self.sources[one].document(of))
            ]
            for both in zip(step.sources.tolist(), step.rows.tolist(), strict=True)
        ]
        return np.array(found, dtype=np.int64)

    def _rows(self, source: int, row: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Sources and rows of prompt and answer."""
        of_prompt, place = divmod(row, self._num_rows)
        other = int(np.searchsorted(self._first, place, side="right")) - 1
        return (source, of_prompt), (other, place - int(self._first[other]))

    def _sides(self, source: int, row: int) -> tuple[_Side, _Side]:
        """Those of a row: of its prompt, and of its answer."""
        prompt, answer = (self._side(*one) for one in self._rows(source, row))
        return prompt, answer

    def _side(self, source: int, row: int) -> _Side:
        length = int(self.sources[source].lengths(np.array([row]))[0])
        trained = super().is_trained(source, row, 0, length - 1)
        return _Side(source, row, length, int(trained.argmax()) + 1 if trained.any() else length)


class UnrelatedPlanner(StepPlanner):
    """Plans, in the place of another planner's steps, their answers behind prompts of others."""

    def __init__(self, planner: StepPlanner) -> None:
        """Take the planner whose steps they are of.

        Raises:
            ValueError: the longest that there may be fits on no number of ranks.
        """
        self.crossed = UnrelatedCorpus(planner.corpus, planner.settings.max_length)
        super().__init__(self.crossed, planner.settings)
        self._steps = planner
        longest = min(2 * planner.corpus.longest - 1, planner.settings.max_length)
        try:
            self.balance(np.array([longest]), planner.settings.strategy)
        except ValueError as error:
            raise ValueError(
                f"an answer behind another row's prompt may have {longest:,} tokens: {error}; or "
                "give --hdp-kto-divergence none"
            ) from error

    def mix(self, position: Position) -> Step:
        """Return those of the step that begins at a position."""
        return self.crossed.of(self._steps.mix(position))
