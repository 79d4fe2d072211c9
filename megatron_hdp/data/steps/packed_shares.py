"""Shares of several ranks as a few byte strings: what is sent costs a message, not its arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.steps.share import RankShare

_ARRAYS = tuple(one.name for one in fields(RankShare))[3:]
_KINDS = (np.uint8, np.int32)


@dataclass(frozen=True)
class PackedShares:
    """The arrays of shares, each column over all ranks at once, in the narrowest integers."""

    hdp_ranks: tuple[int, ...]
    slice_multiples: tuple[int, ...]
    end_together: tuple[bool, ...]
    sizes: bytes
    """``int32[arrays, ranks]``: how much of each column is each rank's."""
    columns: tuple[tuple[str, bytes], ...]
    """Kind of number and contents of each array."""

    @classmethod
    def of(cls, shares: Sequence[RankShare]) -> PackedShares:
        """Return these shares, packed."""
        sizes, columns = [], []
        for name in _ARRAYS:
            arrays = [getattr(one, name) for one in shares]
            sizes.append([len(one) for one in arrays])
            column = _narrow(np.concatenate(arrays)) if arrays else np.zeros(0, dtype=np.uint8)
            columns.append((column.dtype.str, column.tobytes()))
        return cls(
            tuple(one.hdp_rank for one in shares),
            tuple(one.slice_multiple for one in shares),
            tuple(one.ends_together for one in shares),
            np.array(sizes, dtype=np.int32).tobytes(),
            tuple(columns),
        )

    def unpack(self) -> list[RankShare]:
        """Return the shares, the same to the bit."""
        sizes = np.frombuffer(self.sizes, dtype=np.int32).reshape(len(_ARRAYS), -1)
        found: list[dict[str, npt.NDArray[np.generic]]] = [{} for _ in self.hdp_ranks]
        for name, row, (kind, contents) in zip(_ARRAYS, sizes, self.columns, strict=True):
            wide = np.float64 if name == "offload_ratios" else np.int64
            column = np.frombuffer(contents, dtype=kind).astype(wide)
            ends = np.cumsum(row)
            for one, begin, end in zip(found, (ends - row).tolist(), ends.tolist(), strict=True):
                one[name] = column[begin:end]
        return [
            RankShare(*scalars, **arrays)  # type: ignore[arg-type]
            for *scalars, arrays in zip(
                self.hdp_ranks, self.slice_multiples, self.end_together, found, strict=True
            )
        ]


def _narrow(column: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return the same numbers in fewer bytes, where they are integers that fit."""
    if column.dtype != np.int64 or not len(column):
        return column
    numbers: Int64Array = column.astype(np.int64, copy=False)
    least, most = int(numbers.min()), int(numbers.max())
    for kind in _KINDS:
        limits = np.iinfo(kind)
        if limits.min <= least and most <= limits.max:
            return numbers.astype(kind)
    return column
