"""Process groups that a model's parts hold: taken out when they end, new ones put in.

A group that anything still refers to keeps its connections, so that others wait on it for ever.
Megatron keeps every group it has made in a variable of `parallel_state`, whose name says what it is
for: by that name a part gets the new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

_Names: TypeAlias = dict[int, tuple[str, int | None]]


@dataclass(frozen=True)
class _Place:
    """An attribute that held a group."""

    owner: Any
    attribute: str
    variable: str
    number: int | None
    """In the variable's list of groups, if it is one."""


class HeldGroups:
    """The groups that parts of a model hold.

    Args:
        modules: the parts; what they consist of is looked at, too.

    Raises:
        ValueError: a part holds a group that Megatron does not know: it would stay the old one.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        names = dict(_groups_by_variable())
        self._places: list[_Place] = []
        seen: set[int] = set()
        for module in modules:
            for part in module.modules():
                self._look_at(part, names, seen)

    def _look_at(self, owner: Any, names: _Names, seen: set[int]) -> None:
        if id(owner) in seen:
            return
        seen.add(id(owner))
        for attribute, value in vars(owner).items():
            if isinstance(value, dist.ProcessGroup):
                if id(value) not in names:
                    raise ValueError(
                        f"found a process group in {type(owner).__name__}.{attribute} that "
                        "Megatron did not make, expected its own: with it no rank can leave a job"
                    )
                self._places.append(_Place(owner, attribute, *names[id(value)]))
            elif isinstance(value, ProcessGroupCollection) or _is_a_helper(value):
                self._look_at(value, names, seen)

    def take_out(self) -> None:
        """Leaves None where a group was."""
        for place in self._places:
            setattr(place.owner, place.attribute, None)

    def put_in(self) -> None:
        """Puts in the groups that Megatron has by now."""
        for place in self._places:
            found = getattr(parallel_state, place.variable)
            group = found if place.number is None else found[place.number]
            setattr(place.owner, place.attribute, group)


def _groups_by_variable() -> Iterator[tuple[int, tuple[str, int | None]]]:
    """Identity of each group that Megatron keeps, and the variable that it is kept in."""
    for variable, value in vars(parallel_state).items():
        if isinstance(value, dist.ProcessGroup):
            yield id(value), (variable, None)
        elif isinstance(value, list):
            for number, one in enumerate(value):
                if isinstance(one, dist.ProcessGroup):
                    yield id(one), (variable, number)


def _is_a_helper(value: Any) -> bool:
    """An object of Megatron's that a module uses and that is none itself, as a token dispatcher."""
    kind = type(value)
    return (
        kind.__module__.startswith("megatron.core.transformer.moe")
        and not isinstance(value, torch.nn.Module | type)
        and hasattr(value, "__dict__")
    )
