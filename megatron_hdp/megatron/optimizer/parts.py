"""Optimizer state of a run with all experts on every rank, for one that spreads them, and back.

With experts across ranks Megatron has two optimizers, one for experts and one for the rest, else
one for all. What they keep by parameter has the same names either way; settings and step counts,
which are alike in all of them, are kept by optimizer and have to be laid out anew.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.optimizer import MegatronOptimizer


def laid_out(
    loaded: dict[Any, Any], common: dict[Any, Any], optimizer: MegatronOptimizer
) -> dict[Any, Any]:
    """The loaded state of a checkpoint as `optimizer`, this run's, takes it.

    In `loaded` also lies what the checkpoint keeps in common, as the saved run had it: `common`.
    """
    parts = optimizer.chained_optimizers
    saved = list(common.values()) if 0 in common else [common]
    if len(saved) == len(parts):
        return loaded
    by_kind = {_kind(group): group for one in saved for group in _owner(one)["param_groups"]}
    states = []
    for number, part in enumerate(parts):
        state = copy.deepcopy(saved[0])
        _owner(state)["param_groups"] = [
            by_kind[_kind(group)] | {"is_expert_parallel": group["is_expert_parallel"]}
            for group in part.param_groups
        ]
        # of a stage without experts their optimizer has no state
        own = loaded.get(number, {}) if len(parts) > 1 else _without(loaded, common)
        states.append(merge(state, own))
    return dict(enumerate(states)) if len(parts) > 1 else states[0]


def settings(state: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """The groups of parameters in what `laid_out` returns, of all optimizers."""
    for part in state.values() if 0 in state else [state]:
        yield from _owner(part)["param_groups"]


def _owner(state: dict[str, Any]) -> dict[str, Any]:
    """Where an optimizer's state keeps its settings; Megatron wraps some optimizers once more."""
    return state if "param_groups" in state else state["optimizer"]


def _kind(group: dict[str, Any]) -> tuple[Any, ...]:
    """What tells Megatron's groups of parameters apart, besides holding experts."""
    return group["wd_mult"], group["lr_mult"], group["is_decoupled_lr"]


def _without(loaded: dict[Any, Any], common: dict[Any, Any]) -> dict[Any, Any]:
    """What was loaded for a single optimizer from a checkpoint of several, which have numbers."""
    return {key: value for key, value in loaded.items() if key not in common}
