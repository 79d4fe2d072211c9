"""Attributes that are set for a while: what was there is remembered, and all goes back together."""

from __future__ import annotations

from typing import Any

_INHERITED = object()


class Overrides:
    """Attributes that were set, in order; leaving it as a context manager puts all back."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, Any, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._made)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute of a module, a class or an instance."""
        original = vars(owner).get(name, _INHERITED)
        setattr(owner, name, value)
        self._made.append((owner, name, original, value))

    def foreign(self) -> list[str]:
        """Names of those that somebody else has set since."""
        latest = {(id(owner), name): (owner, value) for owner, name, _, value in self._made}
        return [
            f"{getattr(owner, '__name__', owner)}.{name}"
            for (_, name), (owner, value) in latest.items()
            if vars(owner).get(name, _INHERITED) is not value
        ]

    def undo(self) -> None:
        """Puts back what was there, the latest first."""
        while self._made:
            owner, name, original, _ = self._made.pop()
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

    def __enter__(self) -> Overrides:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()
