"""What commands write: files that replace no other, indented JSON, a bar where it takes long."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def check_outputs(
    written: Iterable[tuple[str, str | None]],
    read: Iterable[tuple[str, str | None]],
    suffixes: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Refuse files that cannot be written, before the work is done.

    Args:
        written: flags and their files; None is left out.
        read: likewise, of inputs.
        suffixes: that names may end in, by flag.

    Raises:
        ValueError: another suffix, a folder that is missing, a file named twice or one that is
            read.
    """
    seen = {os.path.realpath(path): flag for flag, path in read if path}
    for flag, path in written:
        if not path:
            continue
        expected = (suffixes or {}).get(flag)
        if expected and os.path.splitext(path)[1] not in expected:
            raise ValueError(f"{flag} {path}: expected a name that ends in {', '.join(expected)}")
        if other := seen.get(os.path.realpath(path)):
            raise ValueError(f"{flag} {path} is the file of {other} as well: give another name")
        if os.path.isdir(path):
            raise ValueError(f"{flag} {path}: found a folder, expected a file's name: add one")
        target = os.path.realpath(path) if os.path.islink(path) else path
        folder = os.path.dirname(target) or "."
        if not os.path.isdir(folder):
            raise ValueError(f"{flag} {path}: found no folder {folder}: make it, or give another")
        seen[os.path.realpath(path)] = flag


def indented(value: Any) -> str:
    """JSON for tools, which people can read too."""
    import orjson

    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()


def write_json(path: str, value: Any) -> None:
    """Write indented JSON, and say so."""
    from megatron_hdp.files import write_atomically

    write_atomically(path, indented(value).encode(), durable=False)
    print(f"written to {path}")


def steps_bar(what: str, total: int):  # type: ignore[no-untyped-def]
    """A bar over steps, which is silent if they take a moment."""
    from tqdm import tqdm

    interval = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, desc=what, delay=1.0, mininterval=interval)
