import numpy as np
from numpy.typing import NDArray

def plan_items(
    patches: NDArray[np.int64],
    consumers: NDArray[np.int32],
    speeds: NDArray[np.float64],
    busy_s: NDArray[np.float64],
    free_s: float,
    *,
    ranks_per_node: int,
    most_ranks: int,
    patches_per_row: int,
    patches_per_pack: int,
    patch_s: float,
    patch2_s: float,
    pack_s: float,
    gathered_s_per_patch: float,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]: ...
