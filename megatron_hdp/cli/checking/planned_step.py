"""A job's global batch planned on lengths of a preset: what a step takes and how many tokens meet.

The cost model is that of the job's shape on GPUs that reach 400 TFLOP/s, or the one measured. It
knows ring traffic, pipelines, recomputation and ranks that wait for each other's experts; it does
not know the traffic inside tensor-parallel ranks and to experts, nor gradient sync.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.megatron.options import (
    cost_model_of_job,
    expert_domain_size,
    planned_weights,
)
from megatron_hdp.planner import CostModel, Plan
from megatron_hdp.planner.experts import exchanged_bytes_per_token
from megatron_hdp.planner.lockstep import knows_stages
from megatron_hdp.planner.memory import Job
from megatron_hdp.planner.network import Nccl
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.planner.shape import ring_ways
from megatron_hdp.simulator.execution import Setting

if TYPE_CHECKING:
    from megatron_hdp.megatron.options import TrainingArguments


@dataclass(frozen=True, kw_only=True)
class StepForecast:
    """One global batch of a preset, planned."""

    preset: str
    num_sequences: int
    num_tokens: int
    longest_tokens: int
    micro_batches: int
    efficiency: float
    step_s: float
    flops_per_s: float
    """The model's FLOP a second and GPU, causal attention, no recomputation."""
    planning_ms: float
    num_positions: int | None
    """Places in the longest list of a rank; None where no rank waits for others' experts."""
    padding_share: float | None
    """Share of the places in all ranks' lists that hold no micro-batch; likewise."""
    exchanged_bytes: float
    """What all GPUs send each other for experts, forward and backward."""
    most_tokens: int
    """Of a micro-batch on one HDP rank; above the capacity only where activations are offloaded."""


def cost_model_of(arguments: "TrainingArguments", job: Job) -> CostModel:
    """Costs of one HDP rank, whose tensor ranks compute and send side by side.

    Raises:
        ValueError: ``--hdp-cost-model`` or ``--hdp-rank-speeds`` cannot be used.
    """
    uses_nccl = arguments.distributed_backend != "gloo"
    nccl = Nccl.installed(arguments.hdp_ring_max_ctas) if uses_nccl else None
    found = cost_model_of_job(arguments, job, nccl=nccl)
    if not job.shape.latent_size or arguments.hdp_mla_ring == "kv":
        return found
    size, tensor_ranks = job.value_bytes, job.tensor_ranks
    return ring_ways(
        job.shape,
        found,
        value_bytes=size,
        tensor_ranks=tensor_ranks,
        some_made=arguments.hdp_mla_ring == "auto",
    ).latent


def run_setting(
    arguments: "TrainingArguments", job: Job, cost_model: CostModel, **others: Any
) -> Setting:
    """What all steps of a configuration share; `others` are further fields."""
    weights = planned_weights(arguments, job.shape.vocab_size) or ()
    return Setting(
        ranks=job.hdp_ranks,
        tokens_per_rank=job.tokens_per_rank,
        cost_model=cost_model,
        num_gpus=job.num_gpus,
        job=job,
        flops_of=job.shape.flops,
        pipeline=Pipeline(job.stages, job.model_chunks, weights),
        lockstep_ranks=expert_domain_size(arguments),
        max_length=arguments.seq_length,
        slice_multiple=arguments.hdp_slice_multiple,
        sequence_parts=arguments.sequence_parts,
        streams=arguments.streams,
        recompute=arguments.hdp_recompute,
        offload=arguments.hdp_offload,
        host_memory_bytes=arguments.host_memory_bytes,
        **others,
    )


def preset_batch(arguments: "TrainingArguments", preset: str, seed: int = 0) -> "Int64Array":
    """Lengths of one global batch of a preset."""
    from megatron_hdp.data.presets import preset_lengths
    from megatron_hdp.megatron.options import sequences_of

    num_tokens, num_sequences = arguments.hdp_global_batch_tokens, sequences_of(arguments)
    if num_tokens is None:  # enough for so many sequences, however long they are
        num_tokens = (num_sequences or 1) * arguments.seq_length
    length = arguments.seq_length
    drawn = preset_lengths(preset, num_tokens=num_tokens, max_length=length, seed=seed)
    return drawn[:num_sequences]


def plan_longest(setting: Setting, strategy: str) -> Plan:
    """Plan of the longest sequence alone; ValueError if it does not fit on all HDP ranks."""
    return setting.planned(np.array([setting.max_length]), strategy)


def plan_step(
    arguments: "TrainingArguments", job: Job, setting: Setting, preset: str
) -> tuple[Plan, StepForecast]:
    """Plan of one global batch of a preset's lengths, and what is told of it.

    Raises:
        ValueError: the batch cannot be planned.
    """
    lengths = preset_batch(arguments, preset)
    made = setting.planned(lengths, arguments.hdp_strategy)
    step_s, efficiency = made.summary["makespan_s"], made.summary["efficiency"]
    stages = setting.pipeline.stages
    if stages > 1 and not knows_stages(arguments.hdp_strategy):  # a plan for one stage was made
        in_stages_s = setting.executed(made).record.makespan_s
        step_s, efficiency = in_stages_s, efficiency * step_s / stages / in_stages_s
    positions = made.summary.get("num_positions")
    exchanged_bytes = exchanged_bytes_per_token(
        values_per_token=job.shape.sent_to_experts,
        value_bytes=job.value_bytes,
        expert_ranks=job.expert_ranks,
    )
    return made, StepForecast(
        preset=preset,
        num_sequences=len(lengths),
        num_tokens=int(lengths.sum()),
        longest_tokens=int(lengths.max()),
        micro_batches=made.num_micro_batches,
        efficiency=efficiency,
        step_s=step_s,
        flops_per_s=job.shape.flops(lengths) / step_s / job.num_gpus,
        planning_ms=made.summary["planning_ms"],
        num_positions=None if positions is None else int(positions),
        padding_share=made.summary.get("padding_share"),
        exchanged_bytes=float(lengths.sum()) * exchanged_bytes,
        most_tokens=int(made.summary["max_tokens_on_a_rank"]),
    )
