"""Text and conversations become pairs of tokens: by workers, resumable, once for the same data."""

from megatron_hdp.data.prepare.cache import Prepared, prepare
from megatron_hdp.data.prepare.shards import Counts
from megatron_hdp.data.prepare.stored import stored_sources
from megatron_hdp.data.prepare.tokenising import write_pair
from megatron_hdp.data.prepare.work import Job

__all__ = ["Counts", "Job", "Prepared", "prepare", "stored_sources", "write_pair"]
