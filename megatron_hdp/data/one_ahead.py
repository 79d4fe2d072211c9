"""Prepares the next item in a background thread while the current one is used."""

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Key = TypeVar("Key")
Item = TypeVar("Item")


class OneAhead(Generic[Key, Item]):
    """Calls ``prepare(key)`` in a thread for the key that is expected next."""

    def __init__(
        self, prepare: Callable[[Key], Item], told_by: Callable[[Key], Hashable] | None = None
    ) -> None:
        """Set what prepares an item, in one thread at a time, and what distinguishes keys."""
        self._prepare = prepare
        self._told_by = told_by or (lambda key: key)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="one-ahead")
        self._expected: tuple[Key, Future[Item]] | None = None

    def expect(self, key: Key) -> None:
        """Start preparing the item of ``key``."""
        self._expected = (key, self._thread.submit(self._prepare, key))

    @property
    def is_ready(self) -> bool:
        """Whether what is expected has been prepared, or has failed."""
        return self._expected is not None and self._expected[1].done()

    def get(self, key: Key) -> Item:
        """Return the item of ``key``, prepared before or now; raise what preparing it raised."""
        expected, self._expected = self._expected, None
        if expected is not None:
            if self._told_by(expected[0]) == self._told_by(key):
                return expected[1].result()
            expected[1].cancel()
        return self._thread.submit(self._prepare, key).result()

    def close(self) -> None:
        """Wait for what is being prepared and end the thread."""
        self._thread.shutdown(cancel_futures=True)
