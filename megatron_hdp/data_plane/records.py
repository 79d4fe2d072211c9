"""Dataclasses as plain values and back, so that what is sent or stored can be read, and is checked.

No pickle: what comes from a file or a socket can only become what the types say.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Return numbers, texts, lists and dictionaries for a tree of dataclasses."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return {name: to_plain(one) for name, one in found.items()}
    if isinstance(value, Mapping):
        return {str(key): to_plain(one) for key, one in value.items()}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [to_plain(one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"found a {type(value).__name__}, expected a dataclass or a plain value")


def from_plain(kind: type[T], plain: Any) -> T:
    """Return what `to_plain` made plain values of.

    Raises:
        ValueError: they are not those of a `kind`.
    """
    found: T = _read(kind, plain)
    return found


def _read(kind: Any, plain: Any) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _of_union(inner, plain)
    if dataclasses.is_dataclass(kind):
        return _of_dataclass(kind, plain)
    if origin is tuple and isinstance(plain, list):
        kinds = [inner[0]] * len(plain) if inner[-1] is Ellipsis else inner
        if len(kinds) != len(plain):
            raise ValueError(f"found {len(plain)} values, expected {len(kinds)}")
        return tuple(_read(one, value) for one, value in zip(kinds, plain, strict=True))
    if origin in (list, Sequence) and isinstance(plain, list):
        return [_read(inner[0], value) for value in plain]
    if origin in (dict, Mapping) and isinstance(plain, dict):
        return {_read(inner[0], key): _read(inner[1], value) for key, value in plain.items()}
    if kind is Path and isinstance(plain, str):
        return Path(plain)
    if kind is float and isinstance(plain, int) and not isinstance(plain, bool):
        return float(plain)
    if kind in (int, float, str, bool) and type(plain) is kind:
        return plain
    raise ValueError(f"found {plain!r:.80}, expected {kind}")


def _of_union(kinds: Sequence[Any], plain: Any) -> Any:
    if plain is None and type(None) in kinds:
        return None
    for kind in kinds:
        if kind is not type(None):
            try:
                return _read(kind, plain)
            except ValueError:
                continue
    raise ValueError(f"found {plain!r:.80}, expected one of {kinds}")


def _of_dataclass(kind: Any, plain: Any) -> Any:
    if not isinstance(plain, dict):
        raise ValueError(f"found {plain!r:.80}, expected the fields of {kind.__name__}")
    kinds = typing.get_type_hints(kind)
    names = {one.name for one in dataclasses.fields(kind)}
    if unknown := set(plain) - names:
        raise ValueError(f"found the fields {sorted(unknown)} in a {kind.__name__}")
    if lacking := _required(kind) - set(plain):
        raise ValueError(f"found no field {sorted(lacking)} in a {kind.__name__}")
    return kind(**{name: _read(kinds[name], value) for name, value in plain.items()})


def _required(kind: Any) -> set[str]:
    none = dataclasses.MISSING
    return {
        one.name
        for one in dataclasses.fields(kind)
        if one.default is none and one.default_factory is none
    }
