"""A file with a description on its first page: written once, then mapped by many processes.

Layout (little endian): 8 bytes magic, ``uint32`` version, ``uint32`` size of the description,
``uint64`` XXH3 of the description, the description (JSON), zeros up to byte 4096, then the content.
The description holds a digest of the content under ``samples``, above 64 MiB of samples of it. A
file is never changed in place: where a mapped file shrinks, the kernel kills whoever touches what
is gone.
"""

import json
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from megatron_hdp.data.hashes import sampled

PAGE = 4096
_HEAD = struct.Struct("<8sIIQ")
_NUM_SAMPLES = 16
_MOST_WHOLE = 1 << 26  # bytes that an opening reads, in some 10 ms
_AT_ONCE = 1 << 20


class DamagedFileError(Exception):
    """A file that is not whole or not of this version; says why, as what is said of the file."""


@dataclass(frozen=True)
class FileKind:
    """What a file begins with."""

    magic: bytes
    version: int

    def describe(self, file: int, about: Mapping[str, Any]) -> None:
        """Write the first page of an open file whose content is complete.

        Raises:
            ValueError: the description is too long for a page.
            OSError: the disk is full, for one.
        """
        samples = _samples(file, os.fstat(file).st_size)
        text = json.dumps({"samples": samples, **about}).encode()
        head = _HEAD.pack(self.magic, self.version, len(text), xxhash.xxh3_64_intdigest(text))
        if len(head) + len(text) > PAGE:
            raise ValueError(f"a description of {len(text):,} bytes is too long for a first page")
        write_at(file, memoryview((head + text).ljust(PAGE, b"\0")), 0)

    def map(
        self, file: int, expected_bytes: Callable[[Mapping[str, Any]], int]
    ) -> tuple[Mapping[str, Any], mmap.mmap]:
        """Map an open file, which may be closed then.

        Args:
            file: its descriptor.
            expected_bytes: the file's size by its description; raises `KeyError`, `TypeError` or
                `ValueError` where that is not understood.

        Returns:
            The description, and the file from its first byte on.

        Raises:
            DamagedFileError: it is not a whole file of this kind.
        """
        about = self._described(os.pread(file, PAGE, 0))
        num_bytes = os.fstat(file).st_size
        try:
            expected = expected_bytes(about)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFileError(f"has an unknown description ({error!r})") from None
        if num_bytes != expected:
            raise DamagedFileError(f"has {num_bytes:,} bytes, expected {expected:,}")
        if _samples(file, num_bytes) != about.get("samples"):
            raise DamagedFileError("has other bytes than were written")
        return about, mmap.mmap(file, num_bytes, prot=mmap.PROT_READ)

    def _described(self, page: bytes) -> Mapping[str, Any]:
        if len(page) < PAGE:
            raise DamagedFileError(f"has {len(page):,} bytes, its first page alone takes {PAGE:,}")
        magic, version, size, digest = _HEAD.unpack_from(page)
        if (magic, version) != (self.magic, self.version):
            raise DamagedFileError(
                f"begins with {magic!r}, version {version}, expected {self.version}"
            )
        text = page[_HEAD.size : _HEAD.size + size]
        if len(text) != size or xxhash.xxh3_64_intdigest(text) != digest:
            raise DamagedFileError("has a damaged description")
        about = json.loads(text)
        if not isinstance(about, dict):
            raise DamagedFileError("has an unknown description")
        return about


def write_at(file: int, data: memoryview, place: int) -> None:
    """Write all bytes of a view, which are not mapped: a full disk is an error, and no signal."""
    while len(data):
        count = os.pwrite(file, data, place)
        data, place = data[count:], place + count


def _samples(file: int, num_bytes: int) -> str:
    """Return a digest of the content, or of samples: they tell zeros and pieces of another file."""
    if num_bytes > _MOST_WHOLE:
        return xxhash.xxh3_64_hexdigest(sampled(file, PAGE, num_bytes, _NUM_SAMPLES))
    digest, place = xxhash.xxh3_64(), PAGE
    while raw := os.pread(file, _AT_ONCE, place):
        digest.update(raw)
        place += len(raw)
    return digest.hexdigest()
