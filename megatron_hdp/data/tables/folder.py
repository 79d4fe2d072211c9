"""The folder of ``--data-cache-path``: made where it is missing, refused by name where it fails."""

import errno
import shutil
from pathlib import Path

_LACK_OF_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class TableCacheError(ValueError):
    """A table of sequences cannot be kept in the folder of caches; the message says why."""


def make_folder(folder: Path) -> None:
    """Make the folder of caches, and those above it.

    Raises:
        TableCacheError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unusable(folder, error) from None


def unusable(folder: Path, error: OSError, num_bytes: int = 0) -> TableCacheError:
    """Return what to say of an error of the system when a file of the folder was written.

    Args:
        folder: the folder of caches.
        error: what the system said.
        num_bytes: of the file, where there may be no room for it.
    """
    found = error.strerror or str(error)
    if error.errno in _LACK_OF_ROOM:
        return TableCacheError(
            f"--data-cache-path {folder}: found no room for a table of sequences ({found}; "
            f"{shutil.disk_usage(folder).free:,} bytes are free), expected {num_bytes:,} bytes: "
            "make room, or name a folder on another disk"
        )
    return TableCacheError(
        f"--data-cache-path {folder}: found a folder that cannot be used ({found}), expected a "
        "folder to keep tables of sequences in: change its permissions or name another one"
    )
