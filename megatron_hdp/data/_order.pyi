import numpy as np
from numpy.typing import NDArray

def epoch_rows(
    first: int, count: int, *, num_rows: int, seed: int, source: int, epoch: int
) -> NDArray[np.int64]: ...
