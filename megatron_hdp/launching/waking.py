"""Lets an agent sleep until something has happened: a process, a signal, news of others."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch.distributed as dist

from megatron_hdp.runtime.epochs import keys

_QUICK_S = 1.0
_LOOK_S = 0.01
_LISTEN = timedelta(days=1)  # the store prints a line each time that it is over
_LAST_S = 2.0


class Sleep:
    """What the main thread does between looks; a context, in which children and signals end it.

    For a second behind each event it sleeps for moments only: what one look does may be what the
    next one waits for.

    Args:
        longest_s: after which it ends anyway, for what is a matter of time.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._quick_until = time.monotonic() + _QUICK_S
        self._lock = threading.Lock()
        self._is_open = False
        self._ear: tuple[dist.Store, threading.Thread] | None = None
        self._is_last = False

    def __enter__(self) -> Self:
        """Takes the kernel's word of children that end or stop, and of signals that have a handler.

        The C handler of any thread writes to the pipe: a handler of Python's would run late.
        """
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)
        self._is_open = True
        self._fd_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._handler_before = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Gives all of it back, and ends the thread that listens."""
        if self._ear is not None:  # one that the store lets go while Python ends aborts
            store, thread = self._ear
            self._ear = None
            self._is_last = True
            keys.ring(store)
            thread.join(_LAST_S)
        signal.signal(signal.SIGCHLD, self._handler_before)
        signal.set_wakeup_fd(self._fd_before)
        with self._lock:
            self._is_open = False
            os.close(self._read)
            os.close(self._write)

    def heed(self, store: dist.Store, ear: dist.Store) -> None:
        """Ends also when others ring (`keys.ring`).

        Args:
            store: of the job.
            ear: another connection to it, on which nothing else waits.
        """
        thread = threading.Thread(target=self._listen, args=(ear,), name="bell", daemon=True)
        self._ear = store, thread
        thread.start()

    def end(self) -> None:
        """Ends the sleep, or the next one; from any thread."""
        with self._lock, suppress(BlockingIOError):  # full of such calls
            if self._is_open:
                os.write(self._write, b"\0")

    def __call__(self) -> None:
        """Sleeps."""
        is_quick = time.monotonic() < self._quick_until
        self._poll.poll(1000 * (_LOOK_S if is_quick else self._longest_s))
        with suppress(BlockingIOError):
            while os.read(self._read, 4096):
                self._quick_until = time.monotonic() + _QUICK_S

    def _listen(self, ear: dist.Store) -> None:
        while not self._is_last:
            try:
                ear.wait([keys.RUNG], _LISTEN)
            except dist.DistStoreError:
                continue  # a quiet day
            ear.delete_key(keys.RUNG)  # who rings from now on is heard the next time
            self.end()
