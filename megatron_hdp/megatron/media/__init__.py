"""Items of a step, encoded over all ranks of the job."""

from megatron_hdp.megatron.media.calls import work_of_calls
from megatron_hdp.megatron.media.drawn import DrawnItems, items_of
from megatron_hdp.megatron.media.encoding import Encoding, JobEncoder, StepMedia
from megatron_hdp.megatron.media.items import BatchMedia, MediaEncoder, MediaItem

__all__ = [
    "BatchMedia",
    "DrawnItems",
    "Encoding",
    "JobEncoder",
    "MediaEncoder",
    "MediaItem",
    "StepMedia",
    "items_of",
    "work_of_calls",
]
