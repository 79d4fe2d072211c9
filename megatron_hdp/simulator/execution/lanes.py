"""What copies to and from the host add to a pass, layer by layer, as `runtime.offload` runs them.

All but the last two layers of a stage take part. With c seconds of compute of a layer and k seconds
of the copies of one:

- forward: the copies of a layer begin with it and end after it, one behind the other; a layer
  begins when the copies of the second one before it have ended, and so does the end of the forward
- backward: when it reaches a layer, the copies of the layer before it begin, one behind the other;
  it reaches that one when they have ended

Both lanes are empty at the end of a pass, so that no micro-batch waits for another's copies.
"""

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]

RESIDENT_LAYERS = 2
"""Those that stay: `runtime.offload.stash`."""


def forward_s(compute_s: Float64Array, copies_s: Float64Array, num_layers: int) -> Float64Array:
    """Seconds of a stage's forward.

    Args:
        compute_s: of all its layers, of each micro-batch.
        copies_s: of all that leaves, likewise.
        num_layers: of the stage.
    """
    if num_layers <= RESIDENT_LAYERS:
        return compute_s
    seconds: Float64Array = np.maximum(compute_s, copies_s + compute_s / num_layers)
    return np.where(copies_s > 0, seconds, compute_s)


def backward_s(compute_s: Float64Array, copies_s: Float64Array, num_layers: int) -> Float64Array:
    """Seconds of a stage's backward; arguments as of `forward_s`."""
    leaving = num_layers - RESIDENT_LAYERS
    if leaving <= 0:
        return compute_s
    late = leaving * np.maximum(0.0, copies_s / leaving - compute_s / num_layers)
    seconds: Float64Array = compute_s + late
    return seconds
