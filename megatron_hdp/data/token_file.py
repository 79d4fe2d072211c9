"""The tokens of a Megatron ``.bin/.idx`` pair, read with numpy alone and when asked for."""

import hashlib
import os
import weakref
from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import ByteArray, Int64Array
from megatron_hdp.data.hashes import SAMPLE_BYTES, sample_places
from megatron_hdp.data.index_checks import IndexChecks
from megatron_hdp.data.index_file import (
    IndexFile,
    TokenFileError,
    TokenFileNotFoundError,
    read_into,
)
from megatron_hdp.data.sums import BLOCK, Sums
from megatron_hdp.files import note_opened

_NUM_SAMPLES = 48


class TokenReader:
    """Reads tokens of one ``PREFIX.bin`` by their place in it.

    It holds nothing but an open file, which is not memory-mapped.

    Attributes:
        prefix: path without ``.bin``.
        dtype: integer type of the tokens on disk.
        sums: what is read is compared with; None: the pair has none.
    """

    def __init__(
        self, prefix: str | os.PathLike[str], dtype: np.dtype[np.generic], num_bytes: int
    ) -> None:
        """Open the file, of which the ``.idx`` covers ``num_bytes``.

        Raises:
            TokenFileNotFoundError: the ``.bin`` is missing.
            TokenFileError: it is shorter than that, or has another size than its ``.sums`` say.
        """
        self.prefix = os.fspath(prefix)
        self.dtype = dtype
        self._bin_path = self.prefix + ".bin"
        self._num_bytes = num_bytes
        if not os.path.isfile(self._bin_path):
            raise TokenFileNotFoundError(
                f"no token file {self._bin_path} beside {self.prefix}.idx: expected "
                f"{num_bytes:,} bytes of tokens; copy it there or make the pair again with "
                "`megatron-hdp preprocess`"
            )
        self._file = os.open(self._bin_path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        if os.fstat(self._file).st_size < self._num_bytes:
            self._refuse_short("")
        self.sums = Sums.beside(self.prefix)

    def note_opened(self) -> None:
        """Note that the ``.bin``, which is of a cache, was opened now."""
        note_opened(self._file)

    def read(self, begin: int, count: int) -> Int64Array:
        """Return ``count`` tokens from the one at place ``begin`` on, as ``int64``.

        Raises:
            ValueError: they lie outside of what the ``.idx`` covers.
            TokenFileError: the ``.bin`` has become too short, or has other bytes than were written.
        """
        num_tokens = self._num_bytes // self.dtype.itemsize
        if not 0 <= begin <= begin + count <= num_tokens:
            raise ValueError(
                f"tokens [{begin}, {begin + count}) of {self._bin_path}: its .idx covers tokens "
                f"[0, {num_tokens})"
            )
        place, num_bytes = begin * self.dtype.itemsize, count * self.dtype.itemsize
        if self.sums is None:
            raw = np.empty(num_bytes, dtype=np.uint8)
            self._read_into(raw, place)
        else:
            raw = self._whole_blocks(self.sums, place, place + num_bytes)
            raw = raw[place % BLOCK :][:num_bytes]
        return raw.view(self.dtype).astype(np.int64, copy=False)

    def _whole_blocks(self, sums: Sums, begin: int, end: int) -> ByteArray:
        """Return the blocks that hold some bytes, which have been compared with their sums."""
        first, stop = begin // BLOCK, -(-end // BLOCK)
        raw = np.empty(min(stop * BLOCK, sums.num_bytes) - first * BLOCK, dtype=np.uint8)
        self._read_into(raw, first * BLOCK)
        sums.require_blocks(raw, first)
        return raw

    def fingerprint(self) -> int:
        """64 bits over samples of the tokens, to tell another ``.bin`` under the same ``.idx``.

        Where the samples lie depends on the size alone: a few dozen places, evenly spread over what
        the ``.idx`` covers, both ends included. A small file is read whole.
        """
        digest = hashlib.blake2b(self._num_bytes.to_bytes(8, "little"), digest_size=8)
        for place in sample_places(0, self._num_bytes, _NUM_SAMPLES):
            sample = np.empty(min(SAMPLE_BYTES, self._num_bytes - place), dtype=np.uint8)
            self._read_into(sample, place)
            digest.update(sample.data)
        return int.from_bytes(digest.digest(), "little")

    def _read_into(self, target: ByteArray, place: int) -> None:
        """Fill ``target`` from byte ``place`` on; threads may do so at the same time."""
        try:
            is_whole = read_into(self._file, target, place)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._bin_path) from error
        if not is_whole:
            self._refuse_short(f" while bytes from {place:,} on were read")

    def _refuse_short(self, when: str) -> None:
        found = os.fstat(self._file).st_size
        raise TokenFileError(
            f"{self._bin_path} has {found:,} bytes{when}, its .idx promises {self._num_bytes:,}: "
            "the file is truncated or belongs to another .idx; copy it again or make the pair "
            "again with `megatron-hdp preprocess`"
        )


@dataclass(frozen=True)
class DocumentIndex:
    """What an ``.idx`` says about its documents: 16 bytes of memory each."""

    dtype: np.dtype[np.generic]
    """Integer type of the tokens in the ``.bin``."""
    lengths: Int64Array
    """Tokens of each document."""
    begins: Int64Array
    """Place of each document's first token in the ``.bin``, counted in tokens."""
    num_bytes: int
    """Least size of the ``.bin`` that holds every document."""


def read_document_index(path: str | os.PathLike[str]) -> DocumentIndex:
    """Read and check an ``.idx`` file; a document of several sequences becomes one.

    Raises:
        TokenFileNotFoundError: there is no such file.
        TokenFileError: it is no index of version 1, is truncated, or contradicts itself.
    """
    index = IndexFile(path)
    checks = IndexChecks(index)
    lengths, begins = np.empty((2, index.num_documents), dtype=np.int64)
    for documents in checks.documents():
        here = slice(documents.first, documents.first + len(documents.lengths))
        lengths[here], begins[here] = documents.lengths, documents.begins
    return DocumentIndex(index.dtype, lengths, begins, checks.num_bytes)


class TokenFile:
    """The documents of one ``PREFIX.bin`` / ``PREFIX.idx`` pair, with all their lengths in memory.

    For commands that look at every document; a run takes a `TokenReader` and a sequence table,
    which hold no memory of their own.

    Attributes:
        prefix: path without ``.bin`` / ``.idx``.
        lengths: ``int64[D]``, tokens of each document; a document that spans several ``.idx``
            sequences is their sum. Empty documents keep their place.
        begins: ``int64[D]``, place of each document's first token in the ``.bin``, in tokens.
        reader: of the tokens.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        """Open the pair, and check both files.

        Raises:
            TokenFileNotFoundError: the ``.idx`` or the ``.bin`` is missing.
            TokenFileError: the ``.idx`` is malformed or promises more than the ``.bin`` holds.
        """
        self.prefix = os.fspath(prefix)
        index = read_document_index(self.prefix + ".idx")
        self.lengths = index.lengths
        self.begins = index.begins
        self.reader = TokenReader(self.prefix, index.dtype, index.num_bytes)

    def read(self, document: int, start: int, stop: int) -> Int64Array:
        """Return tokens ``[start, stop)`` of a document as ``int64``.

        Raises:
            TokenFileError: the ``.bin`` has become too short.
        """
        if not 0 <= start <= stop <= self.lengths[document]:
            raise ValueError(
                f"tokens [{start}, {stop}) of document {document} of {self.prefix}: "
                f"it has tokens [0, {self.lengths[document]})"
            )
        return self.reader.read(int(self.begins[document]) + start, stop - start)
