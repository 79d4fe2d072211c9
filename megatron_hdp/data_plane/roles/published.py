"""A source that is tokenised on the fly, as the planner knows it: loaders say how long rows are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.mixture import TextSource
from megatron_hdp.data_plane.roles.failures import FAILURES, SourceFailure, why_of
from megatron_hdp.data_plane.roles.loading import turns_of

Ask = Callable[[int, str, Sequence[Any]], Any]
"""Asks the loader whose turn it is, by number, or another if it fails: a method and arguments."""


@dataclass(frozen=True)
class PublishedSource(TextSource):
    """The same rows, of which this process decodes none.

    A row is asked of the loader that a constructor will ask for its tokens, which still holds them
    then.
    """

    ask: Ask
    num_serving: Callable[[], int]
    """Loaders that share the work, now."""
    askers: ThreadPoolExecutor

    @classmethod
    def of(
        cls,
        source: TextSource,
        ask: Ask,
        num_serving: Callable[[], int],
        askers: ThreadPoolExecutor,
    ) -> PublishedSource:
        """Return an opened source as one that its loaders publish."""
        known = {one.name: getattr(source, one.name) for one in fields(source)}
        return cls(**known, ask=ask, num_serving=num_serving, askers=askers)

    def lengths(self, rows: Int64Array) -> Int64Array:
        """Return tokens of rows; 0 of one that is empty or bad."""
        return self._asked("lengths", rows)

    def num_trained(self, rows: Int64Array, starts: Int64Array, stops: Int64Array) -> Int64Array:
        """Return of the labelled tokens ``[start, stop)`` of rows those whose label is trained."""
        if self._is_text:
            return stops - starts
        return self._asked("num_trained", rows, starts, stops)

    def _asked(self, method: str, rows: Int64Array, *more: Int64Array) -> Int64Array:
        turns = turns_of(rows, self.num_serving())
        found = np.zeros(len(rows), dtype=np.int64)
        asked = []
        for turn in np.unique(turns).tolist():
            mine = turns == turn
            arguments = [column[mine] for column in (rows, *more)]
            asked.append((mine, self.askers.submit(self.ask, turn, method, arguments)))
        for mine, answer in asked:
            try:
                found[mine] = answer.result()
            except FAILURES as error:
                if not self.spec.may_fail:
                    raise
                raise SourceFailure(self.name, why_of(error)) from error
        return found
