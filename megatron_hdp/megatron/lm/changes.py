"""What taking a model over changes of it, noted so that it can be undone.

Undone is what was changed between `Changes` and `end`, and what steps set in the configuration.
What its owner changes meanwhile stays: weights, gradients, hooks of others, the mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.utils import get_model_config

_OF_STEPS = ("finalize_model_grads_func", "no_sync_func", "timers")
"""What a step sets in a model's configuration."""
_CLASS = ("__class__",)
_NOTHING = object()
_State = dict[tuple[Any, ...], Any]


class Changes:
    """Changes of the modules, parameters and configurations of a model's chunks."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._before = [(one, _state(one)) for one in _parts(chunks)]
        self._configs = {id(one): one for one in map(get_model_config, chunks)}
        self._undoing: list[tuple[Any, _State]] = []

    def end(self) -> None:
        """Notes what is different by now."""
        for part, before in self._before:
            after = _state(part)
            changed = {
                key: before.get(key, _NOTHING)
                for key in before.keys() | after.keys()
                if before.get(key, _NOTHING) is not after.get(key, _NOTHING)
                or (id(part) in self._configs and key[0] in _OF_STEPS)
            }
            self._undoing.append((part, changed))
        self._before = []

    def undo(self) -> None:
        """Puts back what `end` has noted."""
        for part, changed in reversed(self._undoing):
            for key in sorted(changed, key=len):  # a dict before its entries
                _put(part, key, changed[key])
        self._undoing = []


def _parts(chunks: Sequence[Any]) -> Iterator[Any]:
    for chunk in chunks:
        yield get_model_config(chunk)
        yield from chunk.modules()
        yield from chunk.parameters()


def _state(part: Any) -> _State:
    """Class, attributes, and the entries of those that are dicts: modules, parameters, hooks."""
    found: _State = {_CLASS: type(part)}
    for name, value in vars(part).items():
        found[name,] = value
        if isinstance(value, dict):
            found |= {(name, key): one for key, one in value.items()}
    return found


def _put(part: Any, key: tuple[Any, ...], value: Any) -> None:
    if key == _CLASS:
        part.__class__ = value
        return
    target = vars(part) if len(key) == 1 else vars(part)[key[0]]
    if value is _NOTHING:
        target.pop(key[-1], None)
    else:
        target[key[-1]] = value
