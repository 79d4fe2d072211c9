"""When gradients are reduced, and what of it is left behind the last backward.

A reduction is of all ranks: a part of it begins when every rank has that part, and parts follow
each other. Where the runtime overlaps, a rank that `planner.lockstep.end_together` names has them
one by one, evenly over its last backward; any other rank has all of them at its end.
"""

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


def reduced_s(
    end_s: Float64Array,
    last_backward_s: Float64Array,
    in_backward: BoolArray,
    reduction_s: float,
    parts: int,
) -> float:
    """When the gradients of a stage are reduced.

    Args:
        end_s: of each rank's last backward.
        last_backward_s: how long it takes.
        in_backward: whether the rank gives its parts away inside of it.
        reduction_s: of all parts, once all ranks have them.
        parts: equal ones.
    """
    # ready times are linear in the part on each rank, so that only the first and last part decide
    first = np.where(in_backward, end_s - (1 - 1 / parts) * last_backward_s, end_s)
    return max(float(first.max()) + reduction_s, float(end_s.max()) + reduction_s / parts)
