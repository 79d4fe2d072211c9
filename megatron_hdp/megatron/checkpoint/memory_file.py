"""A file in memory that processes of the same user read by its path."""

from __future__ import annotations

import os
import tempfile
import weakref


class MemoryFile:
    """Ends with this process, and with this object.

    On Linux it has no name but that of this process's descriptor, so nothing is left of it however
    the process ends, and it takes no room in ``/dev/shm``. Elsewhere it is a temporary file.
    """

    descriptor: int
    path: str

    def __init__(self, prefix: str) -> None:
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create(prefix)
            self.path = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        else:
            self.descriptor, self.path = tempfile.mkstemp(prefix=prefix)
            weakref.finalize(self, os.unlink, self.path)
        weakref.finalize(self, os.close, self.descriptor)
