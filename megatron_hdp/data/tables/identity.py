"""What tells one ``.idx`` from another: its content, wherever it lies and whenever it was made."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from megatron_hdp.data.hashes import sampled_file
from megatron_hdp.data.index_file import TokenFileError
from megatron_hdp.data.tables.cutting import Cutting

_NUM_SAMPLES = 48
_BLOCK_BYTES = 1 << 20  # stays in a core's cache between reading and summing


@dataclass(frozen=True)
class IndexIdentity:
    """Size and time of an ``.idx`` now, and its content when asked for."""

    path: Path
    num_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> "IndexIdentity":
        """Look at a file that exists."""
        status = os.stat(path)
        return cls(Path(path), status.st_size, status.st_mtime_ns)

    def key(self, cutting: Cutting, version: int) -> str:
        """Return a name for what a cutting makes of it in a version of the caches' format.

        It comes of the size and of samples of the content, so it takes no time.
        """
        parts = (
            version,
            self.num_bytes,
            cutting.max_length,
            cutting.long_sequence,
            cutting.documents.start,
            cutting.documents.stop,
        )
        digest = xxhash.xxh3_128(json.dumps(parts).encode())
        digest.update(sampled_file(self.path, self.num_bytes, _NUM_SAMPLES))
        return digest.hexdigest()

    def content(self, note: Callable[[int, int], None]) -> str:
        """Return the XXH3 of the whole file, which is read; bytes done and all are noted."""
        digest, block, num_read = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK_BYTES)), 0
        with self.path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                digest.update(block[:count])
                num_read += count
                note(num_read, self.num_bytes)
        return digest.hexdigest()

    def require_unchanged(self) -> None:
        """Refuse a file that has changed since it was looked at.

        Raises:
            TokenFileError: it has.
        """
        now = IndexIdentity.of(self.path)
        if now != self:
            raise TokenFileError(
                f"{self.path} changed while it was read: found {now.num_bytes:,} bytes, expected "
                f"{self.num_bytes:,} as before, of the same time; wait until it is complete"
            )
