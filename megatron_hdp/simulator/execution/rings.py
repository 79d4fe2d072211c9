"""How long a ring takes in one pass, hop by hop, as `runtime.ring.attention` runs it.

At the start of a step a member sends on the block that it is about to compute, and posts the
receive of the next one. A block is on its way once both ends have begun that step. A member's next
step starts when it has computed this one, and both what it sends and what it receives have arrived.
Nothing travels in the last step. Layers follow each other alike, so that seconds of all layers
together give the pass; its members leave it together.
"""

import numpy as np

from megatron_hdp.arrays import Float64Array, Int64Array


def pass_s(
    num_members: Int64Array, lead_s: Float64Array, step_s: Float64Array, hop_s: Float64Array
) -> Float64Array:
    """Seconds from the common start of a pass to its last member's end; one entry a ring.

    Args:
        num_members: of each ring; one is no ring and has no hop.
        lead_s: of each member, rings one behind the other: what it computes before its first step
            ends or after its last one begins, and what hides no hop.
        step_s: of each member, one of its steps.
        hop_s: of each ring, one hop.
    """
    begins = np.cumsum(num_members) - num_members
    least: Float64Array = np.minimum.reduceat(step_s, begins)
    most: Float64Array = np.maximum.reduceat(step_s, begins)
    hops = num_members - 1
    exposed: Float64Array = np.maximum(0.0, hop_s - most) * hops
    seconds: Float64Array = most * num_members
    seconds = seconds + np.maximum.reduceat(lead_s, begins) + exposed
    unlike = (least != most) & (hops > 0)
    for degree in np.unique(num_members[unlike]).tolist():
        rings = np.flatnonzero(unlike & (num_members == degree))
        members = begins[rings][:, None] + np.arange(degree)
        seconds[rings] = unlike_pass_s(lead_s[members], step_s[members], hop_s[rings])
    return seconds


def unlike_pass_s(lead_s: Float64Array, step_s: Float64Array, hop_s: Float64Array) -> Float64Array:
    """The same for rings of one degree whose members differ, ``[rings, degree]`` in ring order."""
    degree = lead_s.shape[1]
    following, previous = np.roll(np.arange(degree), -1), np.roll(np.arange(degree), 1)
    begin, hop = lead_s, hop_s[:, None]
    for _ in range(degree - 1):
        # entry i: of the block that member i sends, to the next one
        sent = np.maximum(begin, begin[:, following]) + hop
        begin = np.maximum(begin + step_s, np.maximum(sent, sent[:, previous]))
    seconds: Float64Array = (begin + step_s).max(axis=1)
    return seconds


def own_pass_s(
    num_members: Int64Array, lead_s: Float64Array, step_s: Float64Array, hop_s: Float64Array
) -> Float64Array:
    """Seconds of each member's own work in a pass: hops that its compute does not hide included."""
    degrees, hop = np.repeat(num_members, num_members), np.repeat(hop_s, num_members)
    seconds: Float64Array = (
        lead_s + degrees * step_s + (degrees - 1) * np.maximum(0.0, hop - step_s)
    )
    return seconds
