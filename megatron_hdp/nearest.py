"""The known name that a mistyped one resembles most, which errors suggest."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], cutoff: float = 0.0) -> str:
    """Return the known name that is most like ``name``; with a cutoff above 0 perhaps nothing."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), "")
