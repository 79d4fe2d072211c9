"""A Megatron ``.bin/.idx`` pair read with numpy alone: lengths now, tokens when asked for."""

import hashlib
import os
import weakref

import numpy as np
import numpy.typing as npt

from megatron_hdp.data.index_file import (
    Int64Array,
    TokenFileError,
    TokenFileNotFoundError,
    read_document_index,
)

_NUM_SAMPLES = 48
_SAMPLE_BYTES = 4096


class TokenFile:
    """The documents of one ``PREFIX.bin`` / ``PREFIX.idx`` pair.

    The index is read and both files are checked at once; tokens are read when asked for, so a rank
    touches only its own slices. The ``.bin`` is not memory-mapped: where a mapped file shrinks, the
    kernel kills whoever touches what is gone (SIGBUS); a read says it.

    Attributes:
        prefix: path without ``.bin`` / ``.idx``.
        lengths: ``int64[D]``, tokens of each document; a document that spans several ``.idx``
            sequences is their sum. Empty documents keep their place.
        dtype: integer type of the tokens on disk.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        """Open the pair.

        Raises:
            TokenFileNotFoundError: the ``.idx`` or the ``.bin`` is missing.
            TokenFileError: the ``.idx`` is malformed or promises more than the ``.bin`` holds.
        """
        self.prefix = os.fspath(prefix)
        self._bin_path = self.prefix + ".bin"
        index = read_document_index(self.prefix + ".idx")
        self.lengths = index.lengths
        self.dtype = index.dtype
        self._pointers = index.pointers
        self._num_bytes = index.num_bytes
        self._file = self._open()
        if os.fstat(self._file).st_size < self._num_bytes:
            self._refuse_short("")

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
        tokens = np.empty(stop - start, dtype=self.dtype)
        place = int(self._pointers[document]) + start * self.dtype.itemsize
        self._read_into(tokens.view(np.uint8), place)
        return tokens.astype(np.int64, copy=False)

    def fingerprint(self) -> int:
        """64 bits over samples of the tokens, to tell another ``.bin`` under the same ``.idx``.

        Where the samples lie depends on the size alone: a few dozen places, evenly spread over what
        the ``.idx`` covers, both ends included. A small file is read whole.
        """
        digest = hashlib.blake2b(self._num_bytes.to_bytes(8, "little"), digest_size=8)
        last = max(0, self._num_bytes - _SAMPLE_BYTES)
        places = sorted({last * i // (_NUM_SAMPLES - 1) for i in range(_NUM_SAMPLES)})
        for place in places:
            sample = np.empty(min(_SAMPLE_BYTES, self._num_bytes - place), dtype=np.uint8)
            self._read_into(sample, place)
            digest.update(sample.data)
        return int.from_bytes(digest.digest(), "little")

    def _read_into(self, target: npt.NDArray[np.uint8], place: int) -> None:
        """Fill ``target`` from byte ``place`` on; threads may do so at the same time."""
        begin = place
        while len(target):
            try:
                num_read = os.preadv(self._file, [target.data], place)
            except OSError as error:
                raise OSError(error.errno, error.strerror, self._bin_path) from error
            if num_read == 0:
                self._refuse_short(f" while bytes from {begin:,} on were read")
            target, place = target[num_read:], place + num_read

    def _open(self) -> int:
        """Return the descriptor of the ``.bin``, which lives as long as this object."""
        if not os.path.isfile(self._bin_path):
            raise TokenFileNotFoundError(
                f"no token file {self._bin_path} beside {self.prefix}.idx: expected "
                f"{self._num_bytes:,} bytes of tokens; copy it there or make the pair again with "
                "`megatron-hdp preprocess`"
            )
        file = os.open(self._bin_path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, file)
        return file

    def _refuse_short(self, when: str) -> None:
        found = os.fstat(self._file).st_size
        raise TokenFileError(
            f"{self._bin_path} has {found:,} bytes{when}, its .idx promises {self._num_bytes:,}: "
            "the file is truncated or belongs to another .idx; copy it again or make the pair "
            "again with `megatron-hdp preprocess`"
        )
