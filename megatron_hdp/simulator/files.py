"""A file that is there when it is complete: written under another name, then renamed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def complete_file(path: str | os.PathLike[str]) -> Iterator[str]:
    """Give a temporary name to write to; rename it to ``path`` unless an error is raised."""
    name = os.fspath(path)
    temporary = f"{name}.tmp{os.getpid()}"
    try:
        yield temporary
        os.replace(temporary, name)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)
