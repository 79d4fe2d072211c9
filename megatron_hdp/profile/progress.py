"""How far a profile is: a bar on a terminal, else a line now and then; on the first rank only."""

import sys
import time
from types import TracebackType
from typing import Any, Self

_LINE_S = 10.0


class Progress:
    """What `passes.measure` tells about itself; use it in a ``with`` block.

    Args:
        is_shown: on the first rank.
    """

    def __init__(self, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._bar: Any = None
        self._next_s = time.monotonic() + _LINE_S

    def __enter__(self) -> Self:
        if self._is_shown and sys.stderr.isatty():
            from tqdm import tqdm

            form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}"
            self._bar = tqdm(total=100, bar_format=form, desc="profile")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, what: str, share: float) -> None:
        """Shows what is done now, and the share of the budget that is gone."""
        percent = min(100, int(100 * share))
        if self._bar is not None:
            self._bar.set_description(f"profile, {what}", refresh=False)
            self._bar.update(max(0, percent - self._bar.n))
        elif self._is_shown and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LINE_S
            print(f"profile: {percent} % of the budget, {what}", file=sys.stderr, flush=True)
