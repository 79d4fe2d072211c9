from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def epoch_rows(
    first: int, count: int, *, num_rows: int, seed: int, source: int, epoch: int
) -> NDArray[np.int64]: ...
def mix(
    weights: Sequence[float],
    owed: Sequence[float],
    lengths: NDArray[np.int64],
    amounts: NDArray[np.int64],
    first: Sequence[int],
    used: Sequence[int],
    *,
    sequences: int,
    tokens: int,
    must_take: bool,
) -> tuple[NDArray[np.int32], NDArray[np.int64], list[float], list[int], int]: ...
