"""The job that a training run's options describe on so many GPUs, and what GPUs it refuses."""

import math
from typing import TYPE_CHECKING

from megatron_hdp.megatron.options import (
    expert_layers,
    model_shape,
    num_model_chunks,
    stage_split,
)
from megatron_hdp.planner.memory import Job

if TYPE_CHECKING:
    from megatron_hdp.megatron.options import TrainingArguments

_BYTE_VOCABULARY = 257
_OTHER_VOCABULARY = 128_256  # LLaMA 3's


def job_of(arguments: "TrainingArguments", num_gpus: int, vocab_size: int | None = None) -> Job:
    """The job that parsed options describe."""
    vocab_size = vocab_size or arguments.vocab_size
    if vocab_size is None:
        is_byte = arguments.tokenizer_type == "byte"
        vocab_size = _BYTE_VOCABULARY if is_byte else _OTHER_VOCABULARY
    tensor_ranks = arguments.tensor_model_parallel_size
    # as the model pads it under HDP
    multiple = math.lcm(arguments.make_vocab_size_divisible_by, tensor_ranks)
    return Job(
        shape=model_shape(arguments, -(-vocab_size // multiple) * multiple),
        num_gpus=num_gpus,
        tensor_ranks=tensor_ranks,
        sequence_parallel=arguments.sequence_parallel,
        stages=arguments.pipeline_model_parallel_size,
        model_chunks=num_model_chunks(arguments),
        stage_layers=stage_split(arguments).layers,
        expert_ranks=arguments.expert_model_parallel_size,
        expert_tensor_ranks=arguments.expert_tensor_parallel_size if arguments.num_experts else 1,
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
    if not all(expert_layers(arguments)) and arguments.ffn_hidden_size % tensor_ranks:
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
