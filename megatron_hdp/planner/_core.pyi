from collections.abc import Mapping
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

class _Answer(TypedDict):
    rank_offsets: NDArray[np.int64]
    ranks: NDArray[np.int32]
    sequence_offsets: NDArray[np.int64]
    sequences: NDArray[np.int64]
    local_offsets: NDArray[np.int64]
    local_sequences: NDArray[np.int64]
    local_ranks: NDArray[np.int32]
    offload_ratios: NDArray[np.float64]
    recomputed: NDArray[np.int64] | None
    makespan_s: float
    lower_bound_s: float
    perfect_s: float
    ring_tokens: float
    max_tokens_on_a_rank: int
    positions: NDArray[np.int64] | None
    num_parts: NDArray[np.int64] | None
    stream_parts: NDArray[np.int64] | None
    num_positions: int
    padding_share: float

class Problem:
    def __init__(
        self,
        *,
        lengths: NDArray[np.int64],
        num_ranks: int,
        tokens_per_rank: int,
        slice_multiple: int,
        max_length: int,
        pipeline_stages: int,
        model_chunks: int,
        row_weights: NDArray[np.float64],
        offload: bool,
        host_memory_bytes: float,
        streams: bool,
        recompute: bool,
        effort: int,
        sequence_parts: int,
        linear_tokens: float,
        expert_ranks: int,
        rank_speeds: NDArray[np.float64],
        cost_model: Mapping[str, float | NDArray[np.int64] | NDArray[np.float64]],
    ) -> None: ...

STRATEGIES: tuple[str, ...]

def plan(problem: Problem, strategy: str) -> _Answer: ...
def makespan_s(problem: Problem, **plan: NDArray[np.int64] | NDArray[np.int32]) -> float: ...
def tight_bound_s(problem: Problem) -> float: ...
