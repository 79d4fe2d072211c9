"""What copies to and from the host add to a pass, layer by layer, as `runtime.offload` runs them.

All but the last two layers of a stage take part; with several model chunks (virtual stages) these
are the last ones of its last chunk, and of the others all layers take part. A pass is one through
a chunk. With c seconds of compute of a layer and k seconds of the copies of one:

- forward: the copies of a layer begin with it and end after it, one behind the other; a layer
  begins when the copies of the second one before it have ended, and so does the end of the forward
- backward: when it reaches a layer, the copies of the layer before it begin, one behind the other;
  it reaches that one when they have ended. Where the last layer of a chunk takes part, its own
  begin when backward reaches it, and it waits for them

Both lanes are empty at the end of a pass, so that no micro-batch waits for another's copies.
"""

import numpy as np

from megatron_hdp.arrays import Float64Array, Int64Array
from megatron_hdp.planner.pipeline import Pipeline

RESIDENT_LAYERS = 2
"""Those that stay: `runtime.offload.stash`."""


def layers_of_rows(num_layers: int, pipeline: Pipeline) -> Int64Array:
    """Layers of each row, those of a stage (so many) in chunks as equal as they can be."""
    bounds = num_layers * np.arange(pipeline.chunks + 1) // pipeline.chunks
    layers: Int64Array = np.repeat(np.diff(bounds), pipeline.stages)
    return layers


def leaving_of_rows(row_layers: Int64Array, pipeline: Pipeline) -> Int64Array:
    """How many layers of each row take part: all but the last two of its stage."""
    of_stages = row_layers.reshape(pipeline.chunks, pipeline.stages)
    behind = of_stages[::-1].cumsum(axis=0)[::-1] - of_stages  # in later chunks of the stage
    leaving: Int64Array = np.clip(of_stages + np.minimum(0, behind - RESIDENT_LAYERS), 0, None)
    return leaving.ravel()


def forward_s(
    compute_s: Float64Array, copies_s: Float64Array, num_layers: int, leaving: int
) -> Float64Array:
    """Seconds of a forward through a chunk.

    Args:
        compute_s: of all its layers, of each micro-batch.
        copies_s: of all that leaves, likewise.
        num_layers: of the chunk.
        leaving: of them take part: all, or all but the last two.
    """
    if not leaving:
        return compute_s
    # the last layer waits for the second one before it
    behind_s = compute_s / num_layers if leaving < num_layers else 0.0
    seconds: Float64Array = np.maximum(compute_s, copies_s + behind_s)
    return np.where(copies_s > 0, seconds, compute_s)


def backward_s(
    compute_s: Float64Array, copies_s: Float64Array, num_layers: int, leaving: int
) -> Float64Array:
    """Seconds of a backward through a chunk; arguments as of `forward_s`."""
    if not leaving:
        return compute_s
    copy_s = copies_s / leaving
    late_s = np.maximum(0.0, copy_s - compute_s / num_layers)
    ahead = leaving if leaving < num_layers else leaving - 1
    seconds: Float64Array = compute_s + ahead * late_s + (leaving - ahead) * copy_s
    return seconds
