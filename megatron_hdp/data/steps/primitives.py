"""The primitives by which a step comes about, and functions of the user's own in their place.

They are named as in OVERLORD (arXiv 2504.09844, section 5): *mix* draws sequences, *cost* says what
one takes, *balance* plans them, *distribute* gives the plan's ranks to HDP ranks, *broadcast_at*
says where one rank reads for others, and *plan* does all of it. Each is a method of `StepPlanner`;
this room holds what is called instead, where the file of ``--hdp-data`` names something else.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from megatron_hdp.arrays import Float64Array, Int64Array
from megatron_hdp.data.mixture import Position, ResolvedSchedule, normalised
from megatron_hdp.data.spec import PrimitivesSpec
from megatron_hdp.data.steps.settings import PlannedStep, PlanSettings
from megatron_hdp.planner import CostModel, Plan

AXES = ("tensor",)
"""Along which one rank can read tokens for the others."""

Mix: TypeAlias = Callable[
    [dict[str, float], Position, Sequence[Mapping[str, float]]], Mapping[str, float]
]
"""Weights of the sources, from those of the schedule, where the step begins, and the losses of the
sources in the latest steps that it may depend on, oldest first."""
Cost: TypeAlias = Callable[[Int64Array], Float64Array]
"""Seconds of whole sequences of these lengths on one rank, forward and backward."""
Balance: TypeAlias = Callable[[Int64Array, PlanSettings], Plan]
"""The plan of sequences of these lengths."""
Distribute: TypeAlias = Callable[[Plan, Position, PlanSettings], Sequence[int]]
"""For each rank of a plan the HDP rank that runs it."""
BroadcastAt: TypeAlias = Callable[[bool], Collection[str]]
"""Axes, of `AXES`, along which one rank reads for the others; it is told whether a data plane lays
tokens out where all ranks of a node can map them."""
WholeStep: TypeAlias = Callable[[Any, Position], PlannedStep]
"""The step that begins at a position; it is given the `StepPlanner`, whose primitives it calls."""


class PrimitiveError(ValueError):
    """A function of the user's own cannot be found, raised, or returned what cannot be used."""


@dataclass(frozen=True)
class Primitives:
    """The user's own functions; None: the built-in one."""

    mix: Mix | None = None
    cost: Cost | None = None
    balance: Balance | None = None
    distribute: Distribute | None = None
    broadcast_at: BroadcastAt | None = None
    plan: WholeStep | None = None

    @classmethod
    def of(cls, spec: PrimitivesSpec) -> Primitives:
        """Import the functions that are named.

        Raises:
            PrimitiveError: one cannot be.
        """
        return cls(
            **{key.replace("-", "_"): _imported(key, place) for key, place in spec.named.items()}
        )


class _NoLosses(Sequence[Mapping[str, float]]):
    """Losses of steps that nobody has trained: a function that looks at them is refused."""

    def _refuse(self, *_: Any) -> Any:
        raise PrimitiveError(
            "primitives: mix: found a function that asks for the losses of steps, expected one of "
            "weights and position, for only a run knows losses: leave mix out to see what the "
            "schedule draws"
        )

    __len__ = __getitem__ = _refuse


def untrained_weights(
    spec: PrimitivesSpec, schedule: ResolvedSchedule, names: Sequence[str]
) -> Callable[[Position], tuple[float, ...] | None]:
    """Return what gives the weights of a run's steps without training them; None: the schedule's.

    All functions are imported, as a run does.

    Raises:
        PrimitiveError: one cannot be, or steps depend on more than is known without a run.
    """
    users = Primitives.of(spec)
    if users.plan is not None:
        raise PrimitiveError(
            f"primitives: plan: found {spec.plan}, which draws whole steps for the ranks of a run, "
            "expected mix or none: leave plan out to see what the rest draws"
        )

    def weights_at(position: Position) -> tuple[float, ...] | None:
        if users.mix is None:
            return None
        losses = [] if position.steps < spec.losses_behind else _NoLosses()
        by_source = dict(zip(names, schedule.at(position).weights, strict=True))
        return mixed(users.mix, by_source, position, losses)

    return weights_at


def costed(model: CostModel, spec: PrimitivesSpec, max_length: int) -> CostModel:
    """Return a cost model that follows the user's function, if there is one.

    Raises:
        PrimitiveError: the function cannot be used.
    """
    if spec.cost is None:
        return model
    cost: Cost = _imported("cost", spec.cost)
    try:
        return model.with_costs(cost, max_length)
    except PrimitiveError:
        raise
    except ValueError as error:
        raise PrimitiveError(f"primitives: cost: {spec.cost}: {error}") from error


def mixed(
    mix: Mix,
    weights: Mapping[str, float],
    position: Position,
    losses: Sequence[Mapping[str, float]],
) -> tuple[float, ...]:
    """Return the weights that a user's function gives, in the sources' order, their sum being 1.

    Raises:
        PrimitiveError: it names an unknown source, or weights that add up to nothing.
    """
    found = mix(dict(weights), position, losses)
    if not isinstance(found, Mapping) or not set(found) <= set(weights):
        raise PrimitiveError(
            f"primitives: mix: found {found!r}, expected a weight for each of {', '.join(weights)}"
        )
    values = [_weight(name, found.get(name, 0.0)) for name in weights]
    if not any(values):
        raise PrimitiveError(
            f"primitives: mix: found no weight above 0 for step {position.steps + 1}, expected at "
            "least one"
        )
    return normalised(values)


def balanced(balance: Balance, lengths: Int64Array, settings: PlanSettings) -> Plan:
    """Return the plan that a user's function makes.

    Raises:
        PrimitiveError: it is none for these lengths and ranks.
    """
    made = balance(lengths, settings)
    wanted = ("num_ranks", "tokens_per_rank", "slice_multiple")
    if (
        not isinstance(made, Plan)
        or not np.array_equal(made.lengths, lengths)
        or any(getattr(made, name) != getattr(settings, name) for name in wanted)
    ):
        expected = ", ".join(f"{name} {getattr(settings, name)}" for name in wanted)
        raise PrimitiveError(
            f"primitives: balance: found {made!r:.80}, expected a plan for the step's "
            f"{len(lengths):,} sequences with {expected}"
        )
    return made


def placed(distribute: Distribute, plan: Plan, position: Position, settings: PlanSettings) -> Plan:
    """Return a plan whose ranks are the HDP ranks that a user's function gives.

    Raises:
        PrimitiveError: it does not give each HDP rank once.
    """
    places = np.asarray(distribute(plan, position, settings))
    ranks = np.arange(plan.num_ranks)
    if places.shape != ranks.shape or not np.array_equal(np.sort(places), ranks):
        raise PrimitiveError(
            f"primitives: distribute: found {places.tolist()!r:.80}, expected each of the HDP "
            f"ranks 0 to {plan.num_ranks - 1} once"
        )
    return plan.on_ranks(places)


def axes_of(broadcast_at: BroadcastAt, *, from_plane: bool) -> frozenset[str]:
    """Return the axes that a user's function gives.

    Raises:
        PrimitiveError: one of them is unknown.
    """
    found = broadcast_at(from_plane)
    if isinstance(found, str) or not set(found) <= set(AXES):
        raise PrimitiveError(
            f"primitives: broadcast-at: found {found!r}, expected some of {', '.join(AXES)}, or "
            "none, in a list"
        )
    return frozenset(found)


def _weight(name: str, value: Any) -> float:
    try:
        weight = float(value)
    except (TypeError, ValueError):
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise PrimitiveError(
            f"primitives: mix: found the weight {value!r} of '{name}', expected a finite number "
            "from 0 on"
        )
    return weight


def _imported(key: str, place: str) -> Callable[..., Any]:
    """Return a function that says in one sentence whose it is when it raises."""
    module_name, _, function_name = place.rpartition(":")
    try:
        module = _module(module_name)
    except Exception as error:  # whatever the user's code does
        raise PrimitiveError(
            f"primitives: {key}: found {place}, which cannot be imported "
            f"({type(error).__name__}: {error}): give MODULE:FUNCTION with the module's folder in "
            "PYTHONPATH, or FILE.py:FUNCTION"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise PrimitiveError(
            f"primitives: {key}: found no function {function_name} in {module_name}, expected one"
        )

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except PrimitiveError:
            raise
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise PrimitiveError(
                f"primitives: {key}: {place} raised {type(error).__name__}: {error} in "
                f"{where.filename}, line {where.lineno}: mend it, or leave out '{key}'"
            ) from error

    return call


@functools.cache
def _module(name: str) -> Any:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    own_name = f"megatron_hdp_primitives_{Path(name).stem}"
    spec = importlib.util.spec_from_file_location(own_name, name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
