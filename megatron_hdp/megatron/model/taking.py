"""Which of Megatron's classes HDP takes over: by the methods that it builds on, not by their names.

A subclass of a class of Megatron's is taken as well, unless it overrides what HDP replaces or
relies on. HDP's class stands before it then, so what else it does stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_DERIVED: dict[tuple[str, tuple[type[Any], ...]], type[Any]] = {}


def derived(name: str, bases: tuple[type[Any], ...]) -> type[Any]:
    """One class of these bases by that name, the same at every call.

    Exporters of weights (Megatron-Bridge's, verl's) go by names of Megatron's.
    """
    key = name, bases
    if key not in _DERIVED:
        _DERIVED[key] = type(name, bases, {"__module__": bases[0].__module__})
    return _DERIVED[key]


def take_over_class(
    stock: Any, base: type[Any], ours: type[Any], methods: Sequence[str] = ()
) -> None:
    """Makes an object of Megatron's one of a class of HDP's, or of both where it is of a subclass.

    Args:
        stock: the object.
        base: the class of Megatron's that HDP's goes with.
        ours: HDP's; a subclass of it, or what stands before one.
        methods: those of Megatron's class that HDP replaces or relies on.

    Raises:
        ValueError: see `require_own`; or it is another object.
    """
    if not isinstance(stock, base):
        raise ValueError(
            f"found a {type(stock).__name__}, expected megatron.core's {base.__name__}"
        )
    require_own(stock, base, methods)
    found = type(stock)
    is_whole = found is base and issubclass(ours, base)
    stock.__class__ = ours if is_whole else derived(found.__name__, (ours, found))


def require_own(found: Any, base: type[Any], methods: Sequence[str]) -> None:
    """Refuses an object of a subclass of Megatron's `base` that has one of its methods otherwise.

    Raises:
        ValueError: names the method.
    """
    kind = type(found)
    for method in methods:
        if getattr(kind, method, None) is getattr(base, method, None):
            continue
        cls = next(one for one in kind.__mro__ if method in vars(one))
        raise ValueError(
            f"found {cls.__module__}.{cls.__qualname__}.{method}, expected {base.__name__}'s own "
            f"{method}, which HDP replaces or relies on: take it out of {cls.__qualname__}, or "
            f"build the model of {base.__name__}"
        )
