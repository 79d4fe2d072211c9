"""Every rank says each second what it does; who waits too long, or fails, learns whose fault it is.

Heartbeats go through the job's store, not through its communicators, so they get through when
those hang.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Self

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.runtime.device_progress import Reached
from megatron_hdp.runtime.health.diagnosis import Status, missing_ranks, name_of, stalled_ranks
from megatron_hdp.runtime.health.store import HeartbeatStore
from megatron_hdp.runtime.timeline import CHECKPOINT, MEETING, START, WAITS, Timeline

# In heartbeats. A rank is taken for dead when it has missed so many:
_MISSED_BY_THE_DEAD = 3  # while another rank waits too long for it
_MISSED_WHEN_ASKED_TO_END = 10  # while one waits that its launcher asked to end
_MISSED_WHILE_WAITING = 60  # while one waits at all: loading a library lets no heartbeat through
_BEATS_BEFORE_LOOKING = 10  # how long a rank waits before it asks who lives
_BEATS_AFTER_A_FAILURE = 2  # how long a rank may continue after another has failed
_BEATS_TO_EXPLAIN = 8  # how long failed communication may remain without an explanation
_BEATS_PER_SECOND = 1000  # what the job's store shall have to take from all ranks together
_MOST_CHARACTERS = 200  # of an error's message
_UNHURRIED = frozenset({START, CHECKPOINT})


class RankFailure(RuntimeError):
    """Another rank keeps the job from going on; the message says which one and why."""


class DataFailure(RankFailure):
    """No data come any more: perhaps the rank is lost that holds their plane."""


@dataclass(frozen=True)
class Answer:
    """What was found, and since when it holds."""

    reached: Reached
    asked_at: float
    """In seconds of `time.monotonic`, before it was asked."""


class DeviceWatch(threading.Thread):
    """A thread that asks how far the device has come, which may block; `answer` never waits.

    Args:
        ask: how far the device has come; None as long as there is none.
        interval_s: seconds between two questions.

    Attributes:
        answer: the latest; None before the first.
    """

    def __init__(self, ask: Callable[[], Reached | None], interval_s: float) -> None:
        super().__init__(name="heartbeat-device", daemon=True)
        self._ask = ask
        self._interval_s = interval_s
        self._ends = threading.Event()
        self.answer: Answer | None = None

    def stop(self) -> None:
        """Ends the thread, once a question that blocks is answered; waits for nothing."""
        self._ends.set()

    def run(self) -> None:
        """Asks until it is stopped."""
        while not self._ends.wait(self._interval_s):
            asked_at = time.monotonic()
            reached = self._ask()
            self.answer = None if reached is None else Answer(reached, asked_at)


class Heartbeat:
    """Publishes what this rank does and ends the process when the job cannot continue.

    A context manager around a rank's work in a joined job, for the thread that enters it:

    - If an exception leaves the block, the other ranks are told, and end within seconds. If it is
      failed communication, `RankFailure` is raised from it, which names the rank to blame.
    - If the thread waits for other ranks longer than `stall_timeout_s` while a rank does one thing
      for as long, or all ranks wait, the process prints who is to blame and the thread's stack, and
      ends with `ExitCode.BLAMES_ANOTHER`. Likewise if it waits while a rank is dead, within a
      minute; once this process was asked to end, as launchers do that have lost a rank, within
      seconds. Likewise if another rank has failed.

    Waiting counts where the timeline says so and inside torch.distributed's own calls. On a GPU the
    thread may stand in a launch or a result for what the device waits for: where the device has not
    done all that was launched, what that does counts, if it was found since the thread stands
    there. Before the second step, and while a checkpoint is saved or loaded, `slow_timeout_s` holds
    if it is longer.

    Every rank of the job must enter it. Above 1,000 ranks heartbeats become rarer, so that the
    store takes no more than 1,000 a second.

    Args:
        timeline: what the thread does.
        stall_timeout_s: see above.
        slow_timeout_s: see above.
        store: the job's store, through a connection that nothing else uses.
        rank: this rank.
        world_size: ranks of the job.
        asked_to_end: whether a signal asks this process to end.
        interval_s: seconds between heartbeats.
        end_process: called with a message to end the process.
    """

    def __init__(
        self,
        timeline: Timeline,
        *,
        stall_timeout_s: float,
        slow_timeout_s: float,
        store: dist.Store,
        rank: int,
        world_size: int,
        asked_to_end: Callable[[], bool] = lambda: False,
        interval_s: float | None = None,
        end_process: Callable[[str], None] | None = None,
    ) -> None:
        self._timeline = timeline
        self._stall_timeout_s = stall_timeout_s
        self._slow_timeout_s = max(slow_timeout_s, stall_timeout_s)
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._asked_to_end = asked_to_end
        self._interval_s = interval_s or max(1.0, world_size / _BEATS_PER_SECOND)
        self._end_process = end_process or _end_process
        self._host = socket.gethostname()
        self._step, self._steps_begun = 0, 0
        self._communication_failed = False
        self._device = DeviceWatch(timeline.reached, self._interval_s / 2)
        self._changes, self._changed_at = -1, 0.0
        self._progress: tuple[int, int, bool] | None = None
        self._progress_at = 0.0
        self._decision = threading.Lock()  # held by whoever decides how this rank's part ends
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat-watch", daemon=True)

    @classmethod
    def of_job(
        cls,
        timeline: Timeline,
        *,
        stall_timeout_s: float,
        slow_timeout_s: float,
        asked_to_end: Callable[[], bool] = lambda: False,
    ) -> Self:
        """The heartbeat of this rank of torch.distributed's default group, over its store."""
        return cls(
            timeline,
            stall_timeout_s=stall_timeout_s,
            slow_timeout_s=slow_timeout_s,
            store=distributed_c10d._get_default_store().clone(),
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            asked_to_end=asked_to_end,
        )

    def begin_step(self, step: int) -> None:
        """Notes that `step` begins, counted from 1; the first of a process may take its time."""
        self._step = step
        self._steps_begun += 1

    def __enter__(self) -> Self:
        self._watched = threading.get_ident()
        self._others = HeartbeatStore(
            self._store, self._rank, self._world_size, self._interval_s, self._sample()
        )
        self._others.start()
        self._device.start()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        stack: TracebackType | None,
    ) -> None:
        with self._decision:  # from here on, the watching thread does not end the process
            failure = None if error is None else self._told(error)
            self._leave()
            self._thread.join()
        if failure is not None:
            raise failure from error

    def abandon(self) -> None:
        """Ends it from another thread, at once: nobody hears that this rank leaves."""
        self._stop.set()
        self._device.stop()
        self._others.abandon()

    def _told(self, error: BaseException) -> RankFailure | None:
        """Tells the others of an error of this rank; who is to blame, if communication failed."""
        if is_communication_error(error):
            return RankFailure(f"{self._explain()} [{_first_line(error)}]")
        who = name_of(self._rank, self._others.status)
        self._tell(f"{who} failed: {type(error).__name__}: {_first_line(error)}")
        return None

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s / 2):
            if not self._decision.acquire(blocking=False):
                continue  # the main thread leaves
            try:
                status = self._others.status = self._sample()
                self._others.check()
                reason = self._reason_to_end(status)
                if reason is not None:
                    self._leave()
                    self._end_process(f"error on rank {self._rank}: {reason}")
                    return
            finally:
                self._decision.release()

    def _leave(self) -> None:
        self._stop.set()
        self._device.stop()
        self._others.stop(2 * _MISSED_BY_THE_DEAD * self._interval_s)

    def _sample(self) -> Status:
        frame = sys._current_frames()[self._watched]
        spans = self._timeline.current()
        now = time.monotonic()
        kind, _, micro_batch = spans[-1] if spans else (None, 0.0, None)
        waits = kind in WAITS or frame.f_code.co_filename == distributed_c10d.__file__
        answer, device = self._device_answer(now), None
        if answer is not None and not answer.reached.is_idle:  # it is what the thread stands for
            waits = answer.reached.kind in WAITS
            device = _words(answer.reached.kind, answer.reached.micro_batch)
        waits = waits or self._communication_failed
        number = answer.reached.number if answer is not None else 0
        if (progress := (self._changes, number, waits)) != self._progress:
            self._progress, self._progress_at = progress, now
        return Status(
            host=self._host,
            step=self._step,
            activity=_words(kind, micro_batch),
            call=_call(frame),
            waits=waits,
            still_s=now - self._progress_at,
            device=device,
            device_age_s=now - answer.asked_at if answer is not None else 0.0,
        )

    def _device_answer(self, now: float) -> Answer | None:
        """How far the device had come, asked since the main thread last began or ended something.

        None as long as it was not, or where the question is not answered.
        """
        if (changes := self._timeline.changes) != self._changes:
            self._changes, self._changed_at = changes, now
        answer = self._device.answer
        return answer if answer is not None and answer.asked_at >= self._changed_at else None

    def _reason_to_end(self, status: Status) -> str | None:
        """Why this process must end although its main thread has not failed, or None."""
        grace_s, now = _BEATS_AFTER_A_FAILURE * self._interval_s, time.monotonic()
        failure = self._others.failure or self._others.trouble()
        if failure is not None:
            return failure if now - self._others.failed_at > grace_s else None
        limit_s = self._limit_s()
        is_stuck = status.waits and status.still_s >= limit_s
        silence = self._suspicious_silence(status, is_stuck)
        self._others.want_everyone(silence is not None)
        reason = None if silence is None else self._missing(silence)
        if reason is None and is_stuck:
            reason = self._stalled(limit_s)
        if reason is None:
            return None
        reason = self._tell(reason)
        stack = "".join(traceback.format_stack(sys._current_frames()[self._watched]))
        waited = f"has waited {status.still_s:.0f} s for other ranks"
        return f"{waited}: {reason}\nstack of rank {self._rank}, which waits:\n{stack}"

    def _suspicious_silence(self, status: Status, is_stuck: bool) -> int | None:
        """Heartbeats that a rank must have missed to be taken for dead; None: nobody looks."""
        if is_stuck:
            return _MISSED_BY_THE_DEAD
        if status.waits and self._asked_to_end():
            has_something_to_save = self._steps_begun > 0
            return _MISSED_WHEN_ASKED_TO_END if has_something_to_save else _MISSED_BY_THE_DEAD
        is_long = status.waits and status.still_s >= _BEATS_BEFORE_LOOKING * self._interval_s
        return _MISSED_WHILE_WAITING if is_long else None

    def _limit_s(self) -> float:
        if any(kind == MEETING for kind, _, _ in self._timeline.current()):
            return math.inf
        unhurried = any(kind in _UNHURRIED for kind, _, _ in self._timeline.current())
        is_slow = unhurried or self._steps_begun < 2
        return self._slow_timeout_s if is_slow else self._stall_timeout_s

    def _explain(self) -> str:
        """Whose fault it is that communication has just failed; takes a few heartbeats."""
        self._communication_failed = True
        self._others.status = self._sample()
        self._others.want_everyone(True)
        deadline = time.monotonic() + _BEATS_TO_EXPLAIN * self._interval_s
        reason = None
        while reason is None and time.monotonic() < deadline:
            time.sleep(self._interval_s / 10)
            self._others.check()
            reason = self._others.failure or self._missing()
        if reason is None:
            reason = self._stalled(0) or "communication failed, and no rank is known to be at fault"
        return self._tell(reason)

    def _missing(self, silence: int = _MISSED_BY_THE_DEAD) -> str | None:
        """Names ranks that died, stopped or left, the one that holds the store among them."""
        silence_s = silence * self._interval_s
        everyone = self._others.everyone()
        missing = missing_ranks(everyone, silence_s) if everyone else None
        return self._others.trouble(silence_s) or missing

    def _stalled(self, patience_s: float) -> str | None:
        """Names ranks that stand still, once those that are silent would be known."""
        if self._others.listened_s() < (_MISSED_BY_THE_DEAD + 1) * self._interval_s:
            return None
        return stalled_ranks(self._others.everyone(), patience_s)

    def _tell(self, text: str) -> str:
        return self._others.tell(text, _MISSED_BY_THE_DEAD * self._interval_s)


def is_communication_error(error: BaseException | None) -> bool:
    """True if communication with other ranks failed; gloo's errors have no type of their own."""
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and "gloo" in str(error).lower():
            return True
        error = error.__cause__
    return False


def _words(kind: str | None, micro_batch: int | None) -> str:
    if kind is None:
        return "something without a name"
    return kind if micro_batch is None else f"{kind} of micro-batch {micro_batch}"


def _call(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_name}, {os.path.basename(code.co_filename)}:{frame.f_lineno}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:_MOST_CHARACTERS]


def _end_process(text: str) -> None:
    """Says why and ends the process at once: closing communicators would wait for other ranks."""
    os.write(2, f"{text}\n".encode())  # not through sys.stderr, which the main thread may hold
    os._exit(ExitCode.BLAMES_ANOTHER)
