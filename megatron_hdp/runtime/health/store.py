"""The heartbeats of all ranks in the job's store, exchanged by a thread that may block there."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from megatron_hdp.runtime.health.diagnosis import Heard, Status, name_of

_READERS = 8  # ranks that read every rank's heartbeat first; the others are told what these found
_READERS_ALONE = 4  # heartbeats after which the others read, too
_LINGER = 3  # heartbeats that rank 0 stays at most for the others to hear why it leaves
_NO_FAILURE = "none"


class HeartbeatStore:
    """Publishes this rank's status each interval and hears why the job must end, if it must.

    A store blocks for ever when the process that holds it is stopped, so only the thread made here
    touches it once `start` was called; everything else returns at once or within a few intervals.
    Silence counts while this process itself runs: one that was suspended, or starved by others,
    would take every rank for dead.

    Attributes:
        status: what is published next.
        failure: why the job must end, as a rank told it, or None.
        lost: what went wrong with the store, or None.
        failed_at: when either was first known, in seconds of `time.monotonic`.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, interval_s: float, status: Status
    ) -> None:
        run = store.add(f"heartbeat/runs/{rank}", 1)  # one job may train several times
        self._store = dist.PrefixStore(f"heartbeat/{run}", store)
        self._store.compare_set("failure", "", _NO_FAILURE)
        self._rank = rank
        self._world_size = world_size
        self._interval_s = interval_s
        self._thread = threading.Thread(target=self._talk, name="heartbeat-store", daemon=True)
        self._stop, self._wake, self._told = (threading.Event() for _ in range(3))
        self._is_abandoned = False
        self._beats = 0
        self._to_tell: str | None = None
        self._everyone_wanted_at: float | None = None
        self._is_reader: bool | None = None
        self._listened_s: float | None = None  # for how long everyone is read; None: not read
        self._read_at = 0.0
        self._statuses: dict[int, Status] = {}
        self._silent_s = [0.0] * world_size
        self._checked: tuple[int, float] = (0, time.monotonic())
        self._unanswered_s = 0.0
        self.status = status
        self.failure: str | None = None
        self.lost: str | None = None
        self.failed_at = 0.0

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Publishes that this rank has left and ends the thread, unless the store blocks."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout_s)

    def abandon(self) -> None:
        """Ends the thread without a word more; waits for nothing."""
        self._is_abandoned = True
        self._wake.set()

    def tell(self, text: str, timeout_s: float) -> str:
        """Gives all ranks `text` as the reason to end; returns the one told first, which holds."""
        self._told.clear()
        self._to_tell = text
        self._wake.set()
        deadline = time.monotonic() + timeout_s
        while not self._told.wait(self._interval_s / 50) and time.monotonic() < deadline:
            pass
        return self.failure or text

    def want_everyone(self, wanted: bool) -> None:
        """Begins or ends to read every rank's heartbeat."""
        if not wanted:
            self._everyone_wanted_at = None
        elif self._everyone_wanted_at is None:
            self._everyone_wanted_at = time.monotonic()
            self._wake.set()

    def everyone(self) -> list[Heard]:
        """What is known of each rank, by rank; empty until every rank was looked up."""
        if self._listened_s is None:
            return []
        heard = [
            Heard(self._statuses.get(rank), silent_s)
            for rank, silent_s in enumerate(self._silent_s)
        ]
        heard[self._rank] = Heard(self.status, 0.0)
        return heard

    def listened_s(self) -> float:
        """For how long every rank's heartbeat has been read, without a break."""
        return self._listened_s or 0.0

    def check(self) -> None:
        """Notes how long the store has not answered; to be called often."""
        (beats, at), now = self._checked, time.monotonic()
        if self._beats > beats:
            self._unanswered_s = 0.0
        else:
            self._unanswered_s += min(now - at, self._interval_s)
        self._checked = (self._beats, now)

    def trouble(self, silence_s: float = math.inf) -> str | None:
        """Words about a store that fails or has not answered for `silence_s`, or None."""
        how = self.lost
        if how is None and self._unanswered_s >= silence_s:
            how = f"has not answered for {self._unanswered_s:.0f} s"
        if how is None:
            return None
        first = "rank 0"
        if 0 in self._statuses:
            status = self._statuses[0]
            first = f"{name_of(0, status)}, last {status.doing()}"
        return (
            f"the job's store {how}: the process that holds it died or was stopped, either "
            f"torchrun on the first node or {first}"
        )

    def _talk(self) -> None:
        while True:
            if self._is_abandoned:
                return
            is_last = self._stop.is_set()
            try:
                self._exchange(is_last)
                if is_last:
                    self._leave()
            except RuntimeError as error:  # any kind of store's, once the process behind it is gone
                self.failed_at = self.failed_at or time.monotonic()
                self.lost = f"fails ({str(error).splitlines()[0]})"
                self._told.set()
                return
            if is_last:
                return
            self._wake.wait(self._interval_s)
            self._wake.clear()

    def _leave(self) -> None:
        self._store.add("left", 1)
        deadline = time.monotonic() + _LINGER * self._interval_s
        # The store may live in rank 0's process and end with it.
        while self._rank == 0 and time.monotonic() < deadline:
            if self._store.add("left", 0) >= self._world_size:
                return
            time.sleep(self._interval_s / 50)

    def _exchange(self, is_last: bool) -> None:
        text, self._to_tell = self._to_tell, None
        if text is not None:  # first: nobody shall see that this rank left and not why
            self._store.compare_set("failure", _NO_FAILURE, text)
        status = replace(self.status, beat=self._beats, left=is_last)
        self._store.set(_key(self._rank), status.to_json())
        failure = self._store.get("failure").decode()
        if failure != _NO_FAILURE and self.failure is None:
            self.failed_at = time.monotonic()
            self.failure = failure
        if text is not None:
            self._told.set()
        if self._reads_everyone():
            self._listen()
        else:
            self._listened_s = None
            self._read(range(1))  # in case that the store goes down with rank 0
        self._beats += 1  # the store has answered

    def _reads_everyone(self) -> bool:
        wanted_at = self._everyone_wanted_at
        if wanted_at is None:
            return False
        if self._is_reader is None:
            self._is_reader = self._store.add("readers", 1) <= _READERS
        waited_s = time.monotonic() - wanted_at
        return self._is_reader or waited_s > _READERS_ALONE * self._interval_s

    def _listen(self) -> None:
        """Reads every rank's heartbeat and counts for how long there was no new one."""
        now = time.monotonic()
        gap_s = min(now - self._read_at, self._interval_s)
        self._read_at = now
        news = self._read(range(self._world_size))
        if self._listened_s is None:
            self._silent_s = [0.0] * self._world_size
            self._listened_s = 0.0
            return
        self._silent_s = [
            0.0 if rank in news else silent_s + gap_s
            for rank, silent_s in enumerate(self._silent_s)
        ]
        self._listened_s += gap_s

    def _read(self, ranks: range) -> set[int]:
        """Reads these ranks' heartbeats; returns which of them are new."""
        present: Sequence[int] = ranks
        if not self._store.check([_key(rank) for rank in ranks]):
            present = [rank for rank in ranks if self._store.check([_key(rank)])]
        texts = self._store.multi_get([_key(rank) for rank in present]) if present else []
        latest = {rank: Status.from_json(text) for rank, text in zip(present, texts, strict=True)}
        known = self._statuses
        news = {rank for rank, status in latest.items() if status.beat != _beat(known.get(rank))}
        self._statuses = known | latest
        return news


def _beat(status: Status | None) -> int | None:
    return None if status is None else status.beat


def _key(rank: int) -> str:
    return f"rank/{rank}"
