"""What ``check`` finds: degrees first, then the longest sequence, a planned step and memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_hdp.cli.check_plan import PlannedStep, cost_model_of, plan_longest, plan_step
from megatron_hdp.megatron.options import num_model_chunks, parse_arguments, stage_split
from megatron_hdp.options import PLANNER_FLAGS, OptionError
from megatron_hdp.planner import told_as
from megatron_hdp.planner.memory import (
    RESERVE,
    Job,
    StageMemory,
    most_tokens_per_rank,
    stage_memories,
    waiting_activations,
)

if TYPE_CHECKING:
    from megatron_hdp.megatron.options import TrainingArguments

_BYTE_VOCABULARY = 257
_OTHER_VOCABULARY = 128_256  # LLaMA 3's


@dataclass(kw_only=True)
class Finding:
    """Everything about one configuration; what comes after a refusal may be missing."""

    configs: tuple[str, ...]
    num_gpus: int
    gpu_memory_bytes: float
    refusals: list[str] = field(default_factory=list)
    job: Job | None = None
    context_tokens: int = 0
    memory: StageMemory | None = None
    """Of the fullest stage."""
    stages: list[StageMemory] = field(default_factory=list)
    host_bytes: float = 0.0
    """Activations of one GPU that wait in host memory, at most."""
    host_memory_bytes: float | None = None
    """Of one node; None: not known, and so not checked."""
    gpus_per_node: int = 8
    step: PlannedStep | None = None

    @property
    def is_sound(self) -> bool:
        """Whether nothing was refused."""
        return not self.refusals

    @property
    def reserve_bytes(self) -> float:
        """What is left free of a GPU's memory."""
        return RESERVE * self.gpu_memory_bytes

    @property
    def node_host_bytes(self) -> float:
        """What the GPUs of one node have in its memory, at most."""
        return self.host_bytes * min(self.gpus_per_node, self.num_gpus)


def check(
    configs: Sequence[str],
    *,
    num_gpus: int,
    gpu_memory_bytes: float,
    preset: str,
    vocab_size: int | None = None,
    host_memory_bytes: float | None = None,
    gpus_per_node: int = 8,
) -> Finding:
    """Check one configuration.

    Args:
        configs: YAML files, later ones win.
        num_gpus: of the job.
        gpu_memory_bytes: of one GPU.
        preset: lengths to plan a global batch of.
        vocab_size: of the tokenizer; None for its own (byte) or LLaMA 3's.
        host_memory_bytes: of one node; None leaves it unchecked.
        gpus_per_node: that share it.
    """
    found = Finding(
        configs=tuple(configs),
        num_gpus=num_gpus,
        gpu_memory_bytes=gpu_memory_bytes,
        host_memory_bytes=host_memory_bytes,
        gpus_per_node=gpus_per_node,
    )
    argv = [argument for path in configs for argument in ("--config", path)]
    try:
        # where the data lies is not part of what is checked
        arguments = parse_arguments([*argv, "--hybrid-data-parallel", "--data-path", "unused"])
    except OptionError as error:
        found.refusals.append(str(error))
        return found
    found.refusals += degree_refusals(arguments, num_gpus)
    if found.refusals:
        return found
    job = found.job = job_of(arguments, num_gpus, vocab_size)
    found.context_tokens = arguments.seq_length
    _plan(found, arguments, job, preset)
    _add_memory(found, job)
    return found


def job_of(arguments: "TrainingArguments", num_gpus: int, vocab_size: int | None = None) -> Job:
    """The job that parsed options describe."""
    if vocab_size is None:
        is_byte = arguments.tokenizer_type == "byte"
        vocab_size = _BYTE_VOCABULARY if is_byte else _OTHER_VOCABULARY
    tensor_ranks = arguments.tensor_model_parallel_size
    # as the model pads it under HDP
    multiple = math.lcm(arguments.make_vocab_size_divisible_by, tensor_ranks)
    experts = arguments.num_experts or 0
    return Job(
        num_layers=arguments.num_layers,
        hidden_size=arguments.hidden_size,
        num_attention_heads=arguments.num_attention_heads,
        num_query_groups=arguments.num_query_groups,
        kv_channels=arguments.kv_channels,
        ffn_hidden_size=(experts and arguments.moe_ffn_hidden_size) or arguments.ffn_hidden_size,
        gated=arguments.swiglu,
        rotary_percent=arguments.rotary_percent,
        num_experts=experts,
        experts_per_token=arguments.moe_router_topk if experts else 1,
        vocab_size=-(-vocab_size // multiple) * multiple,
        tied_embeddings=not arguments.untie_embeddings_and_output_weights,
        num_gpus=num_gpus,
        tensor_ranks=tensor_ranks,
        sequence_parallel=arguments.sequence_parallel,
        stages=arguments.pipeline_model_parallel_size,
        model_chunks=num_model_chunks(arguments),
        stage_layers=stage_split(arguments).layers,
        expert_ranks=arguments.expert_model_parallel_size,
        expert_tensor_ranks=arguments.expert_tensor_parallel_size if experts else 1,
        bf16=arguments.bf16,
        distributed_optimizer=arguments.use_distributed_optimizer,
        fused_loss=arguments.hdp_fused_loss,
        recompute=arguments.recompute_granularity,
        recompute_method=arguments.recompute_method,
        recompute_num_layers=arguments.recompute_num_layers or 1,
        tokens_per_rank=arguments.hdp_tokens_per_rank,
    )


def degree_refusals(arguments: "TrainingArguments", num_gpus: int) -> list[str]:
    """What the number of GPUs and the sizes of layers refuse; the parser has seen to the rest."""
    refusals = []
    tensor_ranks = arguments.tensor_model_parallel_size
    stages = arguments.pipeline_model_parallel_size
    rank_gpus = tensor_ranks * stages
    if num_gpus % rank_gpus:
        refusals.append(
            f"--gpus {num_gpus:,} is not a multiple of --tensor-model-parallel-size "
            f"{tensor_ranks} x --pipeline-model-parallel-size {stages} = {rank_gpus}: use "
            f"{num_gpus // rank_gpus * rank_gpus or rank_gpus:,} GPUs or other degrees"
        )
    if arguments.num_experts is None and arguments.ffn_hidden_size % tensor_ranks:
        refusals.append(
            f"--ffn-hidden-size {arguments.ffn_hidden_size} is not a multiple of "
            f"--tensor-model-parallel-size {tensor_ranks}: change one of them"
        )
    expert_gpus = arguments.expert_model_parallel_size * arguments.expert_tensor_parallel_size
    if arguments.num_experts and not refusals and num_gpus // stages % expert_gpus:
        refusals.append(
            f"--gpus {num_gpus:,} / --pipeline-model-parallel-size {stages} = "
            f"{num_gpus // stages:,} GPUs of a stage are not a multiple of "
            f"--expert-model-parallel-size {arguments.expert_model_parallel_size} x "
            f"--expert-tensor-parallel-size {arguments.expert_tensor_parallel_size} = "
            f"{expert_gpus}: use other degrees"
        )
    return refusals


def _plan(found: Finding, arguments: "TrainingArguments", job: Job, preset: str) -> None:
    try:
        with told_as(PLANNER_FLAGS):
            cost_model = cost_model_of(arguments, job)
            plan_longest(arguments, job, cost_model)
            found.step = plan_step(arguments, job, cost_model, preset)
    except ValueError as error:
        found.refusals.append(
            f"--seq-length {arguments.seq_length:,} on {job.hdp_ranks:,} HDP ranks: {error}"
        )


def _add_memory(found: Finding, job: Job) -> None:
    most_tokens = max(job.tokens_per_rank, found.step.most_tokens if found.step else 0)
    found.stages = stage_memories(job, most_tokens)
    memory = found.memory = max(found.stages, key=lambda one: one.total)
    # what a micro-batch has above a capacity's worth waits on the host (equation 3)
    waiting = max(waiting_activations(job, stage) for stage in range(job.stages))
    found.host_bytes = waiting * (most_tokens - job.tokens_per_rank)
    _check_host(found, job)
    usable = found.gpu_memory_bytes - found.reserve_bytes
    if memory.total <= usable:
        return
    fitting = most_tokens_per_rank(job, usable)
    remedy = "raise --tensor-model-parallel-size or --pipeline-model-parallel-size"
    if fitting >= job.tensor_ranks:
        remedy = (
            f"--hdp-tokens-per-rank {min(fitting, job.tokens_per_rank):,} fits"
            f"{'' if most_tokens == job.tokens_per_rank else ' without --hdp-offload'}, or {remedy}"
        )
    found.refusals.append(
        f"--hdp-tokens-per-rank {job.tokens_per_rank:,}: a GPU of stage {memory.stage} needs "
        f"{memory.total / 1e9:.1f} GB, expected at most {usable / 1e9:.1f} GB "
        f"({found.gpu_memory_bytes / 1e9:.1f} less {RESERVE:.0%} reserve): {remedy}"
    )


def _check_host(found: Finding, job: Job) -> None:
    """Refuses what a node's memory cannot hold; 5% of it are left to others, as of a GPU's."""
    if found.host_memory_bytes is None:
        return
    usable = (1 - RESERVE) * found.host_memory_bytes
    if found.node_host_bytes <= usable:
        return
    found.refusals.append(
        f"--hdp-offload auto: {min(found.gpus_per_node, job.num_gpus)} GPUs of a node x "
        f"{found.host_bytes / 1e9:.1f} GB = {found.node_host_bytes / 1e9:,.1f} GB may wait in its "
        f"memory, expected at most {usable / 1e9:,.1f} GB ({found.host_memory_bytes / 1e9:,.1f} "
        f"less {RESERVE:.0%} reserve): set --hdp-offload off, or raise --hdp-tokens-per-rank "
        f"{job.tokens_per_rank:,}, above which activations leave"
    )
