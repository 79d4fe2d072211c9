"""Ranks watch over each other in a session's calls: where one fails, the others say so and end.

Their threads may stand in a collective that only the end of the process gets them out of.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

import torch.distributed as dist

from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.runtime.health import CallsHeartbeat, DisagreementError
from megatron_hdp.runtime.timeline import Timeline

F = TypeVar("F", bound=Callable[..., Any])


class Watch:
    """The heartbeats of a session, on which every rank must agree to have them.

    Args:
        arguments: of the run; nobody watches without ``stall_timeout_seconds``, or one rank alone.
        timeline: what the session does.
    """

    def __init__(self, arguments: TrainingArguments, timeline: Timeline) -> None:
        self._heartbeat: CallsHeartbeat | None = None
        if arguments.stall_timeout_seconds is None or dist.get_world_size() == 1:
            return
        self._heartbeat = CallsHeartbeat.of_job(
            timeline,
            stall_timeout_s=arguments.stall_timeout_seconds,
            slow_timeout_s=60.0 * arguments.distributed_timeout_minutes,
        )
        self._heartbeat.begin()
        self._end = weakref.finalize(self, self._heartbeat.end)  # a session may just be dropped

    def over(self, call: str, shared: type[Exception]) -> AbstractContextManager[None]:
        """Around a call by its name; see `CallsHeartbeat.call`."""
        if self._heartbeat is None:
            return nullcontext()
        return self._heartbeat.call(call, (shared, DisagreementError))

    def end(self) -> None:
        """Ends the heartbeats; calls that follow are not watched."""
        if self._heartbeat is not None:
            self._end()
            self._heartbeat = None


def watched(shared: type[Exception]) -> Callable[[F], F]:
    """A call of a session, watched over; all ranks raise its `shared` errors, if any does."""

    def decorated(call: F) -> F:
        @wraps(call)
        def watched_call(session: Any, *args: Any, **kwargs: Any) -> Any:
            with session._watch.over(call.__name__, shared):
                return call(session, *args, **kwargs)

        return cast(F, watched_call)

    return decorated
