"""Lets the distributed optimizer save torch's Adam, and restore a checkpoint into it.

Megatron expects apex's or TransformerEngine's Adam there, which have their state from the start and
keep no `step` tensor; without a GPU, torch's Adam serves. Methods in the way are overridden on the
instance: two while a checkpoint is loaded, one for good where a rank holds no parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_hdp.overrides import Overrides


@contextmanager
def restorable(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Within the block, `optimizer` can be asked for a loading state dict and given one.

    Unless it is asked, nothing about it changes.
    """
    parts = _with_torch_adam(optimizer)
    with Overrides() as overrides:
        for part in parts:
            overrides.set(part, "sharded_state_dict", _with_state(part))
            overrides.set(part, "_set_main_param_and_optimizer_states", _keeping_step(part))
        try:
            yield
        finally:
            for part in parts:
                _separate_steps(part.optimizer)


def is_torch_adam(adam: object) -> bool:
    """Whether it is torch's own, which has no state before its first step."""
    return type(adam) in (torch.optim.Adam, torch.optim.AdamW)


def _with_torch_adam(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    parts = (
        part for part in optimizer.chained_optimizers if isinstance(part, DistributedOptimizer)
    )
    return [part for part in parts if is_torch_adam(part.optimizer)]


def without_parameters(optimizer: MegatronOptimizer) -> None:
    """Lets a rank be saved whose pipeline stage, or shard of it, holds no parameters.

    Megatron asks torch's Adam for its one `step`, and such an Adam has seen none. What is saved of
    it are settings, and those are the first rank's.
    """
    for part in _with_torch_adam(optimizer):
        if not any(group["params"] for group in part.optimizer.param_groups):
            _add_step(part)


def _add_step(optimizer: DistributedOptimizer) -> None:
    """Overrides `state_dict`, for which Adam then has the state of one parameter, which is left."""
    adam, original = optimizer.optimizer, optimizer.state_dict

    def state_dict() -> Any:
        empty = adam.state_dict()
        of_one = {**empty, "state": {0: {"step": torch.tensor(0.0)}}}
        with Overrides() as overrides:
            overrides.set(adam, "state_dict", lambda: of_one)
            return original()

    optimizer.state_dict = state_dict


def _with_state(optimizer: DistributedOptimizer) -> Callable[..., Any]:
    """A `sharded_state_dict` that makes Adam's state, which it describes, first."""
    original = optimizer.sharded_state_dict

    def sharded_state_dict(*positional: Any, **named: Any) -> Any:
        create_state(optimizer.optimizer)
        return original(*positional, **named)

    return sharded_state_dict


def create_state(adam: torch.optim.Optimizer) -> None:
    """Makes Adam's empty state real: a step with zero gradients at zero learning rate."""
    if adam.state:
        return
    rates = [group["lr"] for group in adam.param_groups]
    for group in adam.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    adam.step()
    adam.zero_grad()
    for group, rate in zip(adam.param_groups, rates, strict=True):
        group["lr"] = rate


def _separate_steps(adam: torch.optim.Optimizer) -> None:
    """Gives each parameter its own `step`; Megatron restores one tensor that all would count up."""
    for state in adam.state.values():
        state["step"] = state["step"].clone()


def _keeping_step(optimizer: DistributedOptimizer) -> Callable[..., None]:
    """A setter that adds Adam's `step`, which the checkpoint keeps elsewhere, to each state.

    What stands there already is the step of the state that Adam had before.
    """
    original = optimizer._set_main_param_and_optimizer_states

    def set_states(model_param: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        group, order = optimizer.model_param_group_index_map[model_param]
        adam = optimizer.optimizer
        step = adam.state[adam.param_groups[group]["params"][order]]["step"]
        with torch.no_grad():  # float32's main parameters are the model's own
            original(model_param, {**tensors, "step": step})

    return set_states
