"""A Megatron ``.bin/.idx`` pair read with numpy alone: lengths now, tokens when asked for."""

import os
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_hdp.data.index_file import (
    Int64Array,
    TokenFileError,
    TokenFileNotFoundError,
    read_document_index,
)


class TokenFile:
    """The documents of one ``PREFIX.bin`` / ``PREFIX.idx`` pair.

    The index is read and both files are checked at once; the tokens are memory-mapped at the first
    :meth:`read`, so a rank touches only the pages of its own slices.

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
        self._check_bin(index.num_bytes)

    def read(self, document: int, start: int, stop: int) -> Int64Array:
        """Return tokens ``[start, stop)`` of a document as ``int64``."""
        if not 0 <= start <= stop <= self.lengths[document]:
            raise ValueError(
                f"tokens [{start}, {stop}) of document {document} of {self.prefix}: "
                f"it has tokens [0, {self.lengths[document]})"
            )
        first = int(self._pointers[document]) + start * self.dtype.itemsize
        last = first + (stop - start) * self.dtype.itemsize
        return self._bytes[first:last].view(self.dtype).astype(np.int64)

    @cached_property
    def _bytes(self) -> npt.NDArray[np.uint8]:
        if os.path.getsize(self._bin_path) == 0:  # an empty file cannot be mapped
            return np.empty(0, dtype=np.uint8)
        return np.asarray(np.memmap(self._bin_path, mode="r", dtype=np.uint8))

    def _check_bin(self, promised_bytes: int) -> None:
        if not os.path.isfile(self._bin_path):
            raise TokenFileNotFoundError(
                f"no token file {self._bin_path} beside {self.prefix}.idx: expected "
                f"{promised_bytes:,} bytes of tokens; copy it there or make the pair again with "
                "`megatron-hdp preprocess`"
            )
        found = os.path.getsize(self._bin_path)
        if found < promised_bytes:
            raise TokenFileError(
                f"{self._bin_path} has {found:,} bytes, its .idx promises {promised_bytes:,}: the "
                "file is truncated or belongs to another .idx; copy it again or make the pair "
                "again with `megatron-hdp preprocess`"
            )
