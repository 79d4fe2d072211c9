"""Items of a step, encoded over all ranks of the job."""

from megatron_hdp.megatron.media.drawn import DrawnItems, items_of
from megatron_hdp.megatron.media.encoding import JobEncoder, StepMedia
from megatron_hdp.megatron.media.items import BatchMedia, MediaEncoder, MediaItem

__all__ = [
    "BatchMedia",
    "DrawnItems",
    "JobEncoder",
    "MediaEncoder",
    "MediaItem",
    "StepMedia",
    "items_of",
]
