"""When gradients are reduced, and what of it is left behind the last backward.

A reduction is of all ranks: a part of it begins when every rank has that part, and parts follow
each other. Where the runtime overlaps, a rank has them one by one, evenly over its last backward.
A rank that `planner.lockstep.end_together` does not name has all of them at its end, and decides
nothing: it stands in a ring, or beside one, whose members go on, so that the last backward of one
of them begins later.
"""

from megatron_hdp.arrays import Float64Array


def reduced_s(
    end_s: Float64Array,
    last_backward_s: Float64Array,
    overlaps: bool,
    reduction_s: float,
    parts: int,
) -> float:
    """When the gradients of a stage are reduced.

    Args:
        end_s: of each rank's last backward.
        last_backward_s: how long it takes.
        overlaps: whether parts are given away inside of it.
        reduction_s: of all parts, once all ranks have them.
        parts: equal ones.
    """
    # ready times are linear in the part on each rank, so that only the first and last part decide
    first_s = end_s - (1 - 1 / parts) * last_backward_s if overlaps else end_s
    first, last = float(first_s.max()), float(end_s.max())
    return max(first + reduction_s, last + reduction_s / parts)
