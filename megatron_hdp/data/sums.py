"""The ``.sums`` beside a ``.bin/.idx`` pair: what its bytes were, compared as they are read.

The first page is that of `data.mapped_file`, with the XXH3 of what else lies beside the ``.bin``.
Then come 4 bytes for each 4 KiB of the ``.bin``, which a kernel reads as a whole anyway: the lower
half of their XXH3, of which their number is the seed.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from megatron_hdp.arrays import ByteArray
from megatron_hdp.data.hashes import hash_of_file
from megatron_hdp.data.index_file import TokenFileError
from megatron_hdp.data.mapped_file import PAGE, DamagedFileError, FileKind
from megatron_hdp.files import new_file

SUFFIX = ".sums"
BLOCK = 4096

_KIND = FileKind(b"HDPSUMS\0", 1)
BESIDE = (".idx", ".spans", ".sides", ".items")
"""Suffixes of what is read whole."""
_BLOCKS_AT_ONCE = 1 << 12


@dataclass(frozen=True)
class Sums:
    """Of one pair, what was written."""

    prefix: str
    num_bytes: int
    """Of the ``.bin``."""
    _of_blocks: npt.NDArray[np.uint32]
    _of_files: Mapping[str, str]

    @classmethod
    def beside(cls, prefix: str | os.PathLike[str]) -> Self | None:
        """Open the sums of a pair; None: it has none, as pairs of other programs.

        Raises:
            TokenFileError: they are damaged, or of a ``.bin`` of another size.
        """
        prefix = os.fspath(prefix)
        try:
            file = os.open(prefix + SUFFIX, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            about, mapped = _KIND.map(file, lambda about: PAGE + 4 * _num_blocks(about["bin"]))
            num_bytes, of_files = int(about["bin"]), dict(about["files"])
        except (DamagedFileError, KeyError, TypeError, ValueError) as error:
            raise TokenFileError(f"{prefix}{SUFFIX} {error}: {_remedy(prefix)}") from None
        finally:
            os.close(file)
        found = os.stat(f"{prefix}.bin").st_size if os.path.exists(f"{prefix}.bin") else num_bytes
        if found != num_bytes:
            raise TokenFileError(
                f"{prefix}.bin has {found:,} bytes, its {SUFFIX} says {num_bytes:,}: the file is "
                f"truncated or damaged; {_remedy(prefix)}"
            )
        return cls(prefix, num_bytes, np.frombuffer(mapped, "<u4", offset=PAGE), of_files)

    def require_blocks(self, raw: ByteArray, first: int) -> None:
        """Refuse bytes of the ``.bin`` that are not what was written, from a block on.

        Raises:
            TokenFileError: names the first block that is not.
        """
        found = _sums(raw, first)
        expected = self._of_blocks[first : first + len(found)].tolist()
        if found != expected:
            place = next(i for i, one in enumerate(found) if one != expected[i]) + first
            raise TokenFileError(
                f"{self.prefix}.bin has other bytes than were written, among the {BLOCK:,} from "
                f"{place * BLOCK:,} on: the file is damaged; {_remedy(self.prefix)}"
            )

    def require_file(self, suffix: str, content: str | None = None) -> None:
        """Refuse a file beside the ``.bin`` by its XXH3, for which it is read unless that is known.

        Raises:
            TokenFileError: it is not what was written.
        """
        if self._of_files.get(suffix) != (content or hash_of_file(self.prefix + suffix)):
            raise TokenFileError(
                f"{self.prefix}{suffix} has other bytes than were written: the file is damaged; "
                f"{_remedy(self.prefix)}"
            )


def write_sums(prefix: str | os.PathLike[str], *, durable: bool) -> None:
    """Write the sums of a pair that is complete, and of what else lies beside it."""
    prefix = os.fspath(prefix)
    beside = {one: prefix + one for one in BESIDE if os.path.exists(prefix + one)}
    with (
        new_file(prefix + SUFFIX, durable=durable) as temporary,
        open(temporary, "w+b") as target,
        open(f"{prefix}.bin", "rb", buffering=0) as source,
    ):
        target.seek(PAGE)
        raw, first = np.empty(_BLOCKS_AT_ONCE * BLOCK, dtype=np.uint8), 0
        while count := source.readinto(raw.data):
            while count % BLOCK and (more := source.readinto(raw.data[count:])):
                count += more
            target.write(np.array(_sums(raw[:count], first), dtype="<u4").tobytes())
            first += _num_blocks(count)
        target.flush()
        of_files = {suffix: hash_of_file(path) for suffix, path in beside.items()}
        about = {"bin": os.fstat(source.fileno()).st_size, "files": of_files}
        _KIND.describe(target.fileno(), about)


def _sums(raw: ByteArray, first: int) -> list[int]:
    """Return the sum of each block of some bytes, which begin with a block of this number."""
    data = raw.data
    return [
        xxh3_64_intdigest(data[place : place + BLOCK], first + place // BLOCK) & 0xFFFFFFFF
        for place in range(0, len(data), BLOCK)
    ]


def _num_blocks(num_bytes: Any) -> int:
    return -(-int(num_bytes) // BLOCK)


def _remedy(prefix: str) -> str:
    return (
        f"copy it again, or remove {prefix}.* and make it again from its source; where another "
        f"program has put a pair in its place, remove {prefix}{SUFFIX}"
    )
