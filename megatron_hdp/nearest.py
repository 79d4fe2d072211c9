"""The known name that a mistyped one resembles most, which errors suggest."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], cutoff: float = 0.0) -> str:
    """Return the known name that is most like ``name``; with a cutoff above 0 perhaps nothing.

    Whether a word is spelt with is or iz does not count.
    """
    spelt = {one.replace("iz", "is"): one for one in known}
    found = difflib.get_close_matches(name.replace("iz", "is"), spelt, n=1, cutoff=cutoff)
    return spelt[found[0]] if found else ""
