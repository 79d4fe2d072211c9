"""How a constructor asks planner and loaders: within a time limit; another loader if one fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from megatron_hdp.data.media import Decoded
from megatron_hdp.data_plane.names import NAMESPACE
from megatron_hdp.data_plane.roles import (
    FencedError,
    Loaded,
    SourceSilent,
    Wanted,
    WantedItems,
)
from megatron_hdp.data_plane.wire import DataPlaneLost

_PAUSE_S = 0.1


class NotOpenError(RuntimeError):
    """A loader has no source yet: it was started before one was known, perhaps once more."""


_LOST = (RayActorError, FencedError, NotOpenError)


class SourceLost(DataPlaneLost, SourceSilent):
    """No loader of a source has answered in time.

    Attributes:
        source: its name.
        why: which loader failed last, and how.
    """

    def __init__(self, source: str, timeout_s: float, why: str) -> None:
        """Name the source, for how long it was asked, and why in vain."""
        super().__init__(
            f"source '{source}' gave no tokens within {timeout_s:.0f} s ({why}): look at its "
            "files and their disk, or raise timeout-s of loaders in the file of --hdp-data"
        )
        self._all = source, timeout_s, why
        self.source = source
        self.why = f"no tokens within {timeout_s:.0f} s: {why}"

    def __reduce__(self) -> tuple[type[SourceLost], tuple[str, float, str]]:
        """Pickle what it was made of: a planner's travels to a constructor."""
        return SourceLost, self._all


def late(what: str) -> DataPlaneLost:
    """Return the error of a part of the data plane that does not come or answer in time."""
    return DataPlaneLost(
        f"{what}: raise timeout-s of loaders in the file of --hdp-data if the nodes are that busy, "
        "and start the job again; it resumes from its checkpoint"
    )


class Asker:
    """Asks the actors of one plane, by their names, from any thread.

    Attributes:
        num_takeovers: answers that came from another loader than the first.
        longest_takeover_s: the longest time that passed until then.
    """

    def __init__(self, timeout_s: float, actor: Callable[[str], Any] | None = None) -> None:
        """Ask with a time limit.

        Args:
            timeout_s: for an answer, with all repetitions.
            actor: finds an actor by its name; None: Ray does.
        """
        self.timeout_s = timeout_s
        self._find = actor or _actor
        self.num_takeovers = 0
        self.longest_takeover_s = 0.0

    def ask(
        self,
        name: str,
        method: str,
        *arguments: Any,
        group: str | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Return what a method of an actor returns; an actor that has died is waited for.

        Args:
            name: of the actor.
            method: of it.
            arguments: of the method.
            group: concurrency group of the actor that answers.
            timeout_s: another time limit than usual.

        Raises:
            DataPlaneLost: it does not answer in time.
            ValueError: what it says of the question.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline, why = time.monotonic() + timeout_s, "it does not answer"
        while time.monotonic() < deadline:
            try:
                call = getattr(self._find(name), method)
                call = call if group is None else call.options(concurrency_group=group)
                return _get(call.remote(*arguments), deadline - time.monotonic())
            except GetTimeoutError:
                break
            except (*_LOST, ValueError) as error:
                if not _is_gone(error):
                    raise
                why = str(error).splitlines()[0]
                time.sleep(_PAUSE_S)
        raise late(
            f"{name} of the data plane gave no answer to '{method}' within {timeout_s:.0f} s "
            f"({why}), expected one"
        )

    def load(self, source: str, loaders: Sequence[str], wanted: Wanted) -> Loaded:
        """Return pieces of a source, of the first of its loaders that answers; see `ask_any`."""
        loaded: Loaded = self.ask_any(source, loaders, "load", [wanted])
        return loaded

    def decode(self, source: str, loaders: Sequence[str], wanted: WantedItems) -> list[Decoded]:
        """Return pictures of a source, of the first of its loaders that answers."""
        found: list[Decoded] = self.ask_any(source, loaders, "decode", [wanted])
        return found

    def ask_any(
        self, source: str, loaders: Sequence[str], method: str, arguments: Sequence[Any]
    ) -> Any:
        """Return what a method of a source's loaders returns, of the first one that answers.

        The method is given the name of the source and the arguments.

        Raises:
            SourceLost: none does in time.
            ValueError: what the loader says of the data.
        """
        began = time.monotonic()
        deadline, why = began + self.timeout_s, "it has none"
        patience_s = self.timeout_s / max(len(loaders), 1)
        while time.monotonic() < deadline:
            for turn, name in enumerate(loaders):
                try:
                    asked = getattr(self._find(name), method).remote(source, *arguments)
                    left_s = min(patience_s, deadline - time.monotonic())
                    answer = _get(asked, max(left_s, _PAUSE_S))
                except GetTimeoutError:
                    why = f"{name} has not answered for {patience_s:.0f} s"
                    continue
                except (*_LOST, ValueError) as error:
                    if not _is_gone(error):
                        raise
                    why = str(error).splitlines()[0]
                    continue
                if turn or time.monotonic() - began > patience_s:
                    self.num_takeovers += 1
                    took_s = time.monotonic() - began
                    self.longest_takeover_s = max(self.longest_takeover_s, took_s)
                return answer
            time.sleep(_PAUSE_S)
        raise SourceLost(source, self.timeout_s, why)


def _actor(name: str) -> Any:
    return ray.get_actor(name, namespace=NAMESPACE)


def _get(asked: Any, timeout_s: float) -> Any:
    """Return an answer; of an error that the actor raised, what it raised itself."""
    try:
        return ray.get(asked, timeout=timeout_s)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, Exception) and not isinstance(cause, RayError):
            raise cause from None
        raise


def _is_gone(error: Exception) -> bool:
    """Whether an actor has died, is being started, or was replaced; Ray's ValueError is no name."""
    if isinstance(error, _LOST):
        return True
    return "Failed to look up actor" in str(error)
