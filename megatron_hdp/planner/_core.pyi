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
    makespan_s: float
    lower_bound_s: float
    perfect_s: float
    ring_tokens: float
    max_tokens_on_a_rank: int
    positions: NDArray[np.int64] | None
    num_positions: int
    padding_share: float

class _CostModel(TypedDict):
    a: float
    linear_s_per_token: float
    g: float
    kv_bytes_per_token: float
    intra_node_bytes_per_s: float
    inter_node_bytes_per_s: float
    ranks_per_node: int
    activation_bytes_per_token: float
    host_bytes_per_s: float
    num_layers: int
    attention_lengths: NDArray[np.int64]
    attention_seconds: NDArray[np.float64]
    attention_b: float
    block_all_layers_s: float
    intra_node_hop_all_layers_s: float
    inter_node_hop_all_layers_s: float
    merge_b: float
    b_experts: float
    window_tokens: int
    window_share: float
    halo_s: float

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
        effort: int,
        expert_ranks: int,
        rank_speeds: NDArray[np.float64],
        cost_model: _CostModel,
    ) -> None: ...

STRATEGIES: tuple[str, ...]

def plan(problem: Problem, strategy: str) -> _Answer: ...
def tight_bound_s(problem: Problem) -> float: ...
