"""The random generators of a run without HDP, in a checkpoint: alike on all data-parallel ranks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker


def sharded() -> ShardedObject:
    """The state now, one entry for each place in the model: pipeline stage and tensor rank."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject(
        "rng_state",
        state,
        (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
        ),
        (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        ),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def restore(state: dict[str, Any]) -> None:
    """Sets every generator to a state that `sharded` gave.

    Raises:
        ValueError: it was saved on a GPU and this is a CPU, or the other way round.
    """
    if ("cuda" in state) != torch.cuda.is_available():
        saved, here = ("a GPU", "a CPU") if "cuda" in state else ("a CPU", "a GPU")
        raise ValueError(
            f"the checkpoint's random generators are of {saved}, this is {here}: add --no-load-rng"
        )
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
