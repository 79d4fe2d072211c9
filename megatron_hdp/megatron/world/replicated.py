"""The state of an optimizer that every HDP rank has whole, carried to another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer


class CarriedState:
    """What an optimizer knows of each of its parameters, in its own order, and its settings.

    Nothing is copied: the new optimizer takes the tensors over. With `settings_only` it takes over
    the settings alone.
    """

    def __init__(self, optimizer: MegatronOptimizer, settings_only: bool = False) -> None:
        self._own = [group for adam in adams_of(optimizer) for group in adam.param_groups]
        self._groups = [
            (
                {name: value for name, value in group.items() if name != "params"},
                [] if settings_only else [(one, adam.state.get(one)) for one in group["params"]],
            )
            for adam in adams_of(optimizer)
            for group in adam.param_groups
        ]

    def put_into(self, optimizer: MegatronOptimizer) -> None:
        """Gives it to the optimizer that was made of the same weights."""
        made = [(adam, group) for adam in adams_of(optimizer) for group in adam.param_groups]
        for (adam, group), (settings, parameters) in zip(made, self._groups, strict=True):
            group.update(settings)
            if not parameters:
                continue
            for new, (old, state) in zip(group["params"], parameters, strict=True):
                if new is not old:  # weights of its own, in float32
                    new.data = old.data
                if state is not None:
                    adam.state[new] = state

    def settings(self) -> list[Any]:
        """All of it but tensors that have a shape: few words, on no device of this rank's."""
        return [
            (_on_host(settings), [_on_host(_numbers(state)) for _, state in parameters])
            for settings, parameters in self._groups
        ]

    def set_settings(self, found: list[Any]) -> None:
        """Takes over what `settings` gave elsewhere; the optimizer's own objects change."""
        for adam_group, parameters, (settings, numbers) in zip(
            self._own, self._groups, found, strict=True
        ):
            _take_over(adam_group, settings)
            for (_, state), mine in zip(parameters[1], numbers, strict=True):
                if state is not None:
                    _take_over(state, mine)

    def tensors(self) -> Iterator[tuple[torch.Tensor, bool]]:
        """All tensors of it, each with whether it belongs to experts that are spread over ranks."""
        for settings, parameters in self._groups:
            is_spread = settings["is_expert_parallel"]
            for one, state in parameters:
                yield one.data, is_spread
                for value in (state or {}).values():
                    if torch.is_tensor(value):
                        yield value, is_spread


def adams_of(optimizer: MegatronOptimizer) -> Iterator[Any]:
    """PyTorch's optimizers inside of Megatron's; a stage without parameters has none."""
    for part in optimizer.chained_optimizers:
        if not getattr(part, "is_stub_optimizer", False):
            yield part.optimizer


def _numbers(state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those of a parameter's state that have no shape, as Adam's step."""
    named = (state or {}).items()
    return {name: one for name, one in named if torch.is_tensor(one) and not one.dim()}


def _on_host(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one.cpu() if torch.is_tensor(one) else one for name, one in found.items()}


def _take_over(mine: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Takes values over, tensors as copies where this rank's own lie."""
    for name, value in found.items():
        if torch.is_tensor(value):
            own = mine.get(name, value)
            value = value.to(own.device, copy=True)
        mine[name] = value
