"""Hashes of contents, by which prepared data is told apart: XXH3, at the speed of memory."""

import os
from datetime import datetime

import xxhash

_BLOCK_BYTES = 2**20  # stays in a core's cache, and in the memory of every process that opens data
SAMPLE_BYTES = 4096


def hash_of_bytes(raw: bytes) -> str:
    """Return 128 bits of a content, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(raw)


def hash_of_file(path: str | os.PathLike[str]) -> str:
    """Return 128 bits of a file's content, in hexadecimal."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as stream:
        block = bytearray(_BLOCK_BYTES)
        view = memoryview(block)
        while count := stream.readinto(block):
            digest.update(view[:count])
    return digest.hexdigest()


def change_of(size: int, time_ns: int, now: os.stat_result) -> str:
    """Return what is not as it was of a file: its size, else when it was written."""
    if now.st_size != size:
        return f"{size:,} bytes before, {now.st_size:,} now"
    then, since = (datetime.fromtimestamp(ns / 1e9) for ns in (time_ns, now.st_mtime_ns))
    return f"{size:,} bytes as before, but written {since}, not {then}"


def sample_places(begin: int, end: int, num_samples: int) -> list[int]:
    """Return where samples of bytes ``[begin, end)`` lie: evenly spread, both ends included."""
    last = max(begin, end - SAMPLE_BYTES)
    return sorted({begin + (last - begin) * i // (num_samples - 1) for i in range(num_samples)})


def sampled(file: int, begin: int, end: int, num_samples: int) -> bytes:
    """Return samples of bytes ``[begin, end)`` of an open file; a short stretch whole."""
    places = sample_places(begin, end, num_samples)
    return b"".join(os.pread(file, min(SAMPLE_BYTES, end - place), place) for place in places)


def sampled_file(path: str | os.PathLike[str], num_bytes: int, num_samples: int) -> bytes:
    """Return samples of the first bytes of a file."""
    with open(path, "rb", buffering=0) as file:
        return sampled(file.fileno(), 0, num_bytes, num_samples)
