"""A mixture that follows the loss: what is learnt more slowly than the rest is drawn more often.

The file of --hdp-data names it, with a path from that file's folder:

    primitives: {mix: follow_the_loss.py:mix}
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from megatron_hdp.data.mixture import Position

MOST = 2.0  # times its weight in the schedule that a source gets at most, and at least half of it


def mix(
    weights: dict[str, float], position: Position, losses: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Return the schedule's weights, each times the source's loss over the mean of all sources.

    Args:
        weights: of the schedule, by source.
        position: where the step begins; not needed here.
        losses: of the latest steps by source, oldest first; of sources that had loss tokens.
    """
    drawn = [name for name, weight in weights.items() if weight]
    seen = {name: [one[name] for one in losses if name in one] for name in drawn}
    if not all(seen.values()):
        return weights  # too early to tell
    found = {name: fmean(values) for name, values in seen.items()}
    mean = fmean(found.values())
    return {name: weights[name] * min(max(found[name] / mean, 1 / MOST), MOST) for name in drawn}
