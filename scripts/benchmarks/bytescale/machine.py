"""One set of constants for all cells, each with its source, and what it makes of a model.

Derived, in this order, from the paper's own measurements:

- *Figure 6a* (one layer, milliseconds at n times 4K tokens) is 0.1545 n^2 + 0.54 n for attention
  and 0.88 n for the MLP within 6 % from 8K on: at 64K the square takes 63.5 % of a layer.
- *Figure 21* is a whole step of 64K tokens without offload: 5.08 s, 59 GB. That is LLaMA-7B on 8
  GPUs: there our memory model says 58.5 GB, and 24.6 GB at ratio 1 (27 GB in the figure). 3.23 s
  for attention's square (6 L H s^2 FLOP) are 131 TFLOP/s a GPU, 1.85 s for the matrices of the
  layers and the output (6.2e9 parameters) 164 TFLOP/s.
- *Case study*: 1,024 GPUs, CP = 256 and 8 micro-batches of a batch of 32M tokens make DP 2 and so
  TP 2: a rank is two GPUs with 8,192 tokens. Their K and V of a layer (32 MiB in BF16) in 1.5 ms
  are 11.2 GB/s a GPU.
- *Case study*: the baseline's step of 520 s. It takes that long with 5/3 of the traffic that both
  passes have in BF16 at that speed. FP32 gradients make 4/3; the ring of degree 39 takes 1.9 ms a
  step, 1.27 times as much. Why it is 5/3 the paper does not say: this factor is calibrated.
- *Figure 21*: from ratio 0.6 to 1 a step takes 1.11 s more for 12.8 GB: 11.5 GB/s a GPU.
"""

import dataclasses
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bytescale.paper import PIPELINED, Row

from megatron_hdp.cli.checking import job_of
from megatron_hdp.megatron.options import parse_arguments, without_virtual_stages
from megatron_hdp.planner import CostModel
from megatron_hdp.planner.memory import Job, fullest_stage
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.planner.shape import BYTES_PER_VALUE, model_of
from megatron_hdp.simulator.execution import Machine, Setting

_CONFIGS = Path(__file__).parents[3] / "configs"
_TENSOR_RANKS = (1, 2, 4, 8)
_RUNTIME_BYTES = 3e9  # of CUDA and NCCL: with it Figure 21's 59 GB are met


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Speeds are those of one GPU."""

    attention_flops_per_s: float = 131e12
    linear_flops_per_s: float = 164e12
    network_bytes_per_s: float = 11.2e9
    ring_traffic: float = 5 / 3
    """Of both passes, over that of K, V and their gradients in BF16."""
    nvlink_bytes_per_s: float = 200e9
    """Each way, in the data sheet of the A800 (400 GB/s both ways)."""
    host_bytes_per_s: float = 11.5e9
    activation_bytes: float = 34.0
    """Of a token, layer and channel (arXiv 2205.05198)."""
    tokens_per_rank: int = 8192
    gpu_memory_bytes: float = 80e9
    gpus_per_node: int = 8


@dataclass(frozen=True)
class Layout:
    """GPUs of an HDP rank."""

    tensor_ranks: int
    stages: int


@cache
def layout_of(model: str, gpus: int, constants: Constants) -> Layout:
    """The least TP at which a GPU holds the capacity, experts spread over the tensor ranks."""
    stages = 2 if model in PIPELINED else 1
    for tensor_ranks in _TENSOR_RANKS:
        job = job_with(model, gpus, Layout(tensor_ranks, stages), constants.tokens_per_rank)
        memory = fullest_stage(job, constants.tokens_per_rank)
        if memory.total <= constants.gpu_memory_bytes:
            return Layout(tensor_ranks, stages)
    raise ValueError(f"{model}: {constants.tokens_per_rank:,} tokens fit at no TP up to 8")


@cache
def job_with(model: str, gpus: int, layout: Layout, tokens_per_rank: int) -> Job:
    """The job of ``configs/`` on these ranks, under the paper's plain schedule."""
    flags = {
        "config": _CONFIGS / "bytescale" / f"{model}-2m.yaml",
        "data-path": "unused",
        "tensor-model-parallel-size": layout.tensor_ranks,
        "pipeline-model-parallel-size": layout.stages,
        "hdp-tokens-per-rank": tokens_per_rank,
    }
    if model.startswith("mistral"):
        flags["expert-model-parallel-size"] = layout.tensor_ranks
    argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    if layout.tensor_ranks == 1:
        argv.append("--no-sequence-parallel")
    job = job_of(without_virtual_stages(parse_arguments(argv)), gpus)
    return dataclasses.replace(job, runtime_bytes=_RUNTIME_BYTES)


def cost_model_of(model: str, job: Job, layout: Layout, constants: Constants) -> CostModel:
    """Costs of an HDP rank."""
    named = model_of(model)
    shape = named.shape
    hidden_size = shape.attention_width / shape.num_layers
    one = CostModel.of_tensor_ranks(
        layout.tensor_ranks,
        num_layers=shape.num_layers,
        hidden_size=hidden_size,
        num_parameters=job.shape.active_parameters,
        kv_bytes_per_token=named.kv_bytes_per_token * constants.ring_traffic,
        query_ratio=shape.ring_costs(BYTES_PER_VALUE)["query_ratio"],
        flops_per_s=constants.linear_flops_per_s,
        intra_node_bytes_per_s=constants.nvlink_bytes_per_s,
        inter_node_bytes_per_s=constants.network_bytes_per_s,
        host_bytes_per_s=constants.host_bytes_per_s,
        ranks_per_node=constants.gpus_per_node,
    )
    return dataclasses.replace(
        one,
        a=one.a * constants.linear_flops_per_s / constants.attention_flops_per_s,
        num_layers=shape.num_layers // layout.stages,
        activation_bytes_per_token=constants.activation_bytes
        * hidden_size
        * shape.num_layers
        / layout.stages,
    )


def setting_of(
    row: Row, context: int, constants: Constants, layout: Layout | None = None
) -> Setting:
    """What all strategies of a cell share."""
    layout = layout or layout_of(row.model, row.gpus, constants)
    job = job_with(row.model, row.gpus, layout, constants.tokens_per_rank)
    cost_model = cost_model_of(row.model, job, layout, constants)
    return Setting(
        ranks=job.hdp_ranks,
        tokens_per_rank=constants.tokens_per_rank,
        cost_model=cost_model,
        num_gpus=row.gpus,
        pipeline=Pipeline(layout.stages),
        max_length=context,
        machine=Machine.of_job(job, cost_model),
    )
