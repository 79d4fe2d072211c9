"""The job that a training run's options describe on so many GPUs, and what GPUs it refuses."""

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from megatron_hdp.cli.checking.encoder import encoder_weights
from megatron_hdp.megatron import options
from megatron_hdp.planner.memory import Job
from megatron_hdp.planner.shape import ModelShape

if TYPE_CHECKING:
    from megatron_hdp.encoders import ItemEncoder
    from megatron_hdp.megatron.options import TrainingArguments


def job_of(arguments: "TrainingArguments", num_gpus: int, vocab_size: int | None = None) -> Job:
    """The job that parsed options describe.

    Raises:
        ValueError: ``--vocab-size`` of the configuration is less than `vocab_size`.
    """
    return options.job_of(arguments, num_gpus, options.vocab_size_of(arguments, vocab_size))


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
    if not all(options.expert_layers(arguments)) and arguments.ffn_hidden_size % tensor_ranks:
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


def training_refusals(
    arguments: "TrainingArguments", shape: ModelShape, encoder: "ItemEncoder | None" = None
) -> list[str]:
    """What a run would refuse of the weights that it shall train, once its model is built."""
    refusals = []
    names = sorted({one for layer in shape.all_layers for one in layer.linears})
    absent = [one for one in arguments.lora_targets if one not in names]
    if arguments.lora_rank is not None and absent:
        refusals.append(
            f"--lora-targets: found {' '.join(absent)}, which no layer of this model has, expected "
            f"some of {' '.join(names)}: name those"
        )
    of_encoder = [] if encoder is None else encoder_weights(encoder)
    for pattern in arguments.hdp_frozen:
        matches_encoder = any(fnmatchcase(name, pattern) for name, _ in of_encoder)
        if shape.training((pattern,)).trains_all and not matches_encoder:
            refusals.append(
                f"--hdp-frozen: found no weight whose name matches {pattern!r}, expected names of "
                "weights as decoder.layers.0.mlp.linear_fc1.weight: begin the pattern with * to "
                "match in every layer"
            )
    trains_encoder = any(weight.requires_grad for _, weight in of_encoder)
    if arguments.hdp_frozen and not shape.trained_parameters and not trains_encoder:
        refusals.append(
            f"--hdp-frozen {' '.join(arguments.hdp_frozen)}: found every weight frozen, expected "
            "some to train: name fewer"
        )
    return refusals
