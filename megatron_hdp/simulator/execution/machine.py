"""What a step takes besides the cost model: gradients, optimizer, messages of stages, loading."""

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from megatron_hdp.arrays import Float64Array
from megatron_hdp.planner import CostModel
from megatron_hdp.planner.json_fields import read_fields
from megatron_hdp.planner.memory import Job, stage_memory

PEAK_FLOPS_PER_S = 989e12
"""Dense BF16 of an H100 or H800 in NVIDIA's data sheet; MFU is a share of it."""

MEMORY_BYTES_PER_S = 3.35e12
"""Of an H100's HBM, from the same sheet; the optimizer reads and writes its state at this speed."""

_BUCKET, _BUCKET_A_RANK = 40_000_000, 1_000_000
"""Parameters of one of Megatron's buckets: the greater of the first and the second a rank."""
_GRADIENT = 4  # bytes


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Bytes and speeds of one GPU. With the defaults a step is what its micro-batches take."""

    gradient_bytes: tuple[float, ...] = (0.0,)
    """Gradients that a GPU of each stage gives to the reduction; one entry: of every stage."""
    parameter_bytes: tuple[float, ...] = (0.0,)
    """Parameters that it has after the gather, likewise."""
    network_bytes_per_s: float = 50e9
    """What a GPU sends to another node in a second."""
    nvlink_bytes_per_s: float = 300e9
    """What it sends within its node."""
    one_node: bool = False
    """Whether all GPUs are in one node, so that nothing takes the network."""
    distributed_optimizer: bool = True
    """Gradients are reduced to shards and parameters gathered; else gradients are all-reduced."""
    overlaps_sync: bool = False
    """Whether reductions begin in the last backward."""
    gradient_buckets: int = 1
    """Parts that are reduced one after another; a part begins when all ranks have it."""
    optimizer_s: float = 0.0
    """Of a step."""
    message_bytes_per_token: float = 0.0
    """Of one token of a micro-batch, from a GPU of one stage to its like of the next."""
    message_latency_s: float = 0.0
    """Seconds of such a message whatever it carries."""
    loading_s: float = 0.0
    """Planning and reading of a step, done beside the step before."""
    peak_flops_per_s: float = PEAK_FLOPS_PER_S
    """Of a GPU, for MFU."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            for one in value if isinstance(value, tuple) else (value,):
                _check(field.name, one)
        for name in ("gradient_bytes", "parameter_bytes"):
            if not getattr(self, name):
                raise ValueError(f"machine: {name} is empty; expected one entry, or one a stage")

    @classmethod
    def of_job(cls, job: Job, cost_model: CostModel, **changes: Any) -> Self:
        """What the job's shape and layout say; speeds are the cost model's, of one GPU each.

        The cost model is of an HDP rank of ``job.tensor_ranks`` GPUs.
        """
        stages = [stage_memory(job, stage) for stage in range(job.stages)]
        weights = max(one.weights for one in stages) / job.value_bytes
        state = max(one.optimizer for one in stages)
        fields: dict[str, Any] = {
            "gradient_bytes": tuple(one.gradients for one in stages),
            "parameter_bytes": tuple(one.weights for one in stages),
            "network_bytes_per_s": cost_model.inter_node_bytes_per_s / job.tensor_ranks,
            "nvlink_bytes_per_s": cost_model.intra_node_bytes_per_s / job.tensor_ranks,
            "one_node": job.num_gpus <= cost_model.ranks_per_node * job.tensor_ranks,
            "distributed_optimizer": job.distributed_optimizer,
            "gradient_buckets": max(
                1, math.ceil(weights / max(_BUCKET, _BUCKET_A_RANK * job.hdp_ranks))
            ),
            "optimizer_s": 2 * state / MEMORY_BYTES_PER_S,
            "message_bytes_per_token": job.value_bytes * job.shape.hidden_size * job.token_share,
        }
        return cls(**(fields | changes))

    def reduction_s(self, stage: int, num_ranks: int) -> float:
        """Seconds that the gradients of a stage take among so many ranks."""
        passes = 1 if self.distributed_optimizer else 2
        return passes * self._collective_s(self.gradient_bytes, stage, num_ranks)

    def gather_s(self, stage: int, num_ranks: int) -> float:
        """Seconds that the parameters of a stage take among so many ranks."""
        if not self.distributed_optimizer:
            return 0.0
        return self._collective_s(self.parameter_bytes, stage, num_ranks)

    def message_s(self, tokens: Float64Array) -> Float64Array:
        """Seconds of the activations of so many tokens of a rank, between two stages."""
        seconds: Float64Array = tokens * (self.message_bytes_per_token / self._bytes_per_s)
        seconds += self.message_latency_s
        return seconds

    @property
    def _bytes_per_s(self) -> float:
        return self.nvlink_bytes_per_s if self.one_node else self.network_bytes_per_s

    def _collective_s(self, of_stages: Sequence[float], stage: int, num_ranks: int) -> float:
        """Each rank sends (N - 1) / N of the bytes: a reduction to shards, or a gather."""
        if len(of_stages) > 1 and stage >= len(of_stages):
            raise ValueError(
                f"machine: found bytes of {len(of_stages)} stages; expected those of stage {stage} "
                "too, or one entry for all"
            )
        num_bytes = of_stages[stage] if len(of_stages) > 1 else of_stages[0]
        return num_bytes * (num_ranks - 1) / num_ranks / self._bytes_per_s


def read_changes(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Fields of `Machine` from a JSON object.

    Raises:
        ValueError: not such an object; gives the nearest name of an unknown key.
    """
    data = read_fields(Machine, path, "machine")
    return {key: tuple(one) if isinstance(one, list) else one for key, one in data.items()}


_SWITCHES = {one.name for one in dataclasses.fields(Machine) if isinstance(one.default, bool)}
_ABOVE_ZERO = {"network_bytes_per_s", "nvlink_bytes_per_s", "peak_flops_per_s", "gradient_buckets"}


def _check(name: str, value: Any) -> None:
    if name in _SWITCHES:
        if not isinstance(value, bool):
            raise ValueError(f"machine: {name} is {value!r}; expected true or false")
        return
    least = "> 0" if name in _ABOVE_ZERO else ">= 0"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf or (value == 0 and name in _ABOVE_ZERO):
        raise ValueError(f"machine: {name} is {value!r}; expected a finite number {least}")
