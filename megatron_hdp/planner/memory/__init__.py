"""What a GPU's memory holds: activations by tokens and offload ratio, weights, optimizer.

Design: `docs/design/memory.md`.
"""

from megatron_hdp.planner.memory.activations import (
    input_share,
    kept_after_forward,
    kept_of_further,
    kept_of_part,
    kept_of_stream,
    keys_of_part,
    second_stream_kept_of_part,
    stream_inputs,
    stream_kept_of_parts,
)
from megatron_hdp.planner.memory.gpu import (
    IN_FLIGHT_BYTES,
    RESERVE,
    StageMemory,
    copies_bytes,
    fullest_stage,
    most_tokens_per_rank,
    num_communicators,
    shard_bytes,
    stage_memories,
    stage_memory,
    waiting_activations,
)
from megatron_hdp.planner.memory.job import EncoderMemory, Job

__all__ = [
    "IN_FLIGHT_BYTES",
    "RESERVE",
    "EncoderMemory",
    "Job",
    "StageMemory",
    "copies_bytes",
    "fullest_stage",
    "input_share",
    "kept_after_forward",
    "kept_of_further",
    "kept_of_part",
    "kept_of_stream",
    "keys_of_part",
    "most_tokens_per_rank",
    "num_communicators",
    "second_stream_kept_of_part",
    "shard_bytes",
    "stage_memories",
    "stage_memory",
    "stream_inputs",
    "stream_kept_of_parts",
    "waiting_activations",
]
