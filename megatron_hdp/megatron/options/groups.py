"""The options of a run but for its model, under the names and defaults of Megatron's own flags.

What a type says of ``None``, and what a help says, is as in `model_options`.
"""

from dataclasses import dataclass
from pathlib import Path

from megatron_hdp.options import option

_MOST_SEQUENCES = 2**24  # of a global batch: every rank draws and plans all of them
_MOST_SEED = 2**32 - 1  # numpy's
_MOST_PARAMETERS = 2**53  # counted exactly in a float
_MOST_MINUTES = 14 * 24 * 60  # the job's store waits in milliseconds, of which int32 holds 24 days


@dataclass(frozen=True, kw_only=True)
class OptimizationOptions:
    """Optimization."""

    micro_batch_size: int = option(
        1, minimum=1, help="Sequences in a micro-batch; with HDP the plan decides instead."
    )
    global_batch_size: int | None = option(
        None,
        minimum=1,
        maximum=_MOST_SEQUENCES,
        help="Sequences in a global batch (without HDP: micro-batch x ranks).",
    )
    rampup_batch_size: tuple[int, ...] = option(
        (),
        metavar="N",
        help="Let the global batch grow: its first size, by how much it grows at a time, and after "
        "how many sequences it reaches --global-batch-size.",
    )
    step_batch_size_schedule: str | None = option(
        None,
        metavar="TEXT",
        help="Sizes of the global batch from points on, instead of --global-batch-size: 0:64 "
        "250M:128. A point counts --seq-length tokens for each sequence.",
    )
    eval_global_batch_size: int | None = option(
        None,
        minimum=1,
        maximum=_MOST_SEQUENCES,
        help="Sequences in a batch of evaluation (default: as in a global batch).",
    )
    train_iters: int = option(None, minimum=1, required=True, help="Steps to train.")
    seed: int = option(
        1234, minimum=0, maximum=_MOST_SEED, help="Seed of weights and of the order of the data."
    )
    lr: float = option(None, minimum=0.0, required=True, help="Learning rate.")
    min_lr: float = option(0.0, minimum=0.0, help="Least learning rate of the schedule.")
    lr_decay_style: str = option(
        "linear", choices=("constant", "linear", "cosine"), help="Shape of the decay."
    )
    lr_decay_iters: int = option(
        None, minimum=1, help="Steps of the decay (default: --train-iters)."
    )
    lr_warmup_iters: int = option(0, minimum=0, help="Steps of linear warm-up.")
    lr_warmup_fraction: float | None = option(
        None, minimum=0.0, maximum=1.0, help="Warm-up as a share of --lr-decay-iters."
    )
    weight_decay: float = option(0.01, minimum=0.0, help="Weight decay.")
    adam_beta1: float = option(0.9, minimum=0.0, below=1.0, help="Adam's first beta.")
    adam_beta2: float = option(0.999, minimum=0.0, below=1.0, help="Adam's second beta.")
    adam_eps: float = option(1e-8, minimum=0.0, maximum=1.0, help="Adam's epsilon.")
    clip_grad: float = option(1.0, minimum=0.0, help="Clip the gradient's norm to this (0: no).")
    recompute_granularity: str | None = option(
        None, choices=("full", "selective"), help="Recompute activations in backward."
    )
    recompute_method: str | None = option(
        None, choices=("uniform", "block"), help="Which layers full recomputation takes."
    )
    recompute_num_layers: int | None = option(
        None, minimum=1, help="Layers a recomputed unit (uniform) or recomputed in all (block)."
    )


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """Parallelism."""

    tensor_model_parallel_size: int = option(1, minimum=1, help="Ranks that share a layer.")
    sequence_parallel: bool = option(
        False,
        help="Split norms and dropout between tensor-parallel ranks too (no effect without).",
    )
    pipeline_model_parallel_size: int = option(
        1, minimum=1, help="Pipeline stages, of equally many layers unless a flag says otherwise."
    )
    decoder_first_pipeline_num_layers: int | None = option(
        None, minimum=1, help="Layers of the first stage; the others share the rest."
    )
    decoder_last_pipeline_num_layers: int | None = option(
        None, minimum=1, help="Layers of the last stage; the others share the rest."
    )
    account_for_embedding_in_pipeline_split: bool = option(
        False, help="The embedding counts as a layer of the first stage."
    )
    account_for_loss_in_pipeline_split: bool = option(
        False, help="Output layer and loss count as a layer of the last stage."
    )
    pipeline_model_parallel_layout: str | None = option(
        None,
        metavar="TEXT",
        help="What each stage holds, virtual stages included, by letters: E (embedding), t (a "
        "layer), L (loss), | between stages, *n to repeat: Ett|(ttt|)*2,ttL.",
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None, minimum=1, help="Layers of a virtual stage (interleaved schedule; needs HDP)."
    )
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None, minimum=1, help="Virtual stages on a rank: another way to say the same."
    )
    use_distributed_optimizer: bool = option(False, help="Shard the optimizer state (ZeRO-1).")
    overlap_grad_reduce: bool = option(False, help="Reduce gradients while backward runs.")
    ddp_bucket_size: int | None = option(
        None,
        minimum=1,
        maximum=_MOST_PARAMETERS,
        help="Parameters in a gradient bucket (default: Megatron's).",
    )
    distributed_backend: str = option(
        "auto",
        choices=("auto", "nccl", "gloo"),
        help="Communication; auto (not in Megatron) is nccl on GPUs and gloo on CPUs.",
    )
    distributed_timeout_minutes: int = option(
        10, minimum=1, maximum=_MOST_MINUTES, help="How long a collective may wait for a rank."
    )
    stall_timeout_seconds: float = option(
        None,
        minimum=1,
        maximum=60 * _MOST_MINUTES,
        help="End the job when ranks have waited this long for one that stands still (not in "
        "Megatron; default: --distributed-timeout-minutes).",
    )


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Data."""

    data_path: tuple[str, ...] = option(
        (),
        metavar="[WEIGHT] PREFIX",
        help="Prefixes of the .bin/.idx pairs to train on, or weights (shares of the tokens) and "
        "prefixes in turn.",
    )
    data_args_path: str | None = option(
        None, metavar="FILE", help="Text file that holds what --data-path would."
    )
    train_data_path: tuple[str, ...] = option(
        (), metavar="[WEIGHT] PREFIX", help="Like --data-path, for training alone, whole documents."
    )
    valid_data_path: tuple[str, ...] = option(
        (), metavar="[WEIGHT] PREFIX", help="The same for validation."
    )
    test_data_path: tuple[str, ...] = option(
        (), metavar="[WEIGHT] PREFIX", help="The same for test; this command runs none."
    )
    per_split_data_args_path: str | None = option(
        None, metavar="FILE", help="JSON file that holds these lists under train, valid and test."
    )
    data_cache_path: str | None = option(
        None,
        metavar="DIR",
        help="Folder of files that the processes of a node share: tables of sequences, sources "
        "that were tokenised. Without it tables lie in every process, and sources are tokenised "
        "into the folder hdp-cache beside the data.",
    )
    sft: bool = option(
        False, help="The data are JSON lines of conversations; weights are shares of rows."
    )
    sft_tokenizer_prompt_format: str = option(
        "nemotron-h-aligned",
        metavar="NAME",
        help="How --sft writes a conversation, by Megatron's names.",
    )
    multiple_validation_sets: bool = option(
        False,
        help="Report validation losses by source; under hybrid data parallelism that is always so.",
    )
    split: str = option(
        "969,30,1", metavar="A,B,C", help="Shares of documents to train, validate and test on."
    )
    tokenizer_type: str = option(
        "byte",
        choices=("byte", "HuggingFaceTokenizer", "TikTokenizer"),
        help="Tokenizer of the data; gives the vocabulary's size.",
    )
    tokenizer_model: str | None = option(
        None, metavar="PATH|NAME", help="Folder (HuggingFace) or encoding (tiktoken)."
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Evaluation, checkpoints, logs."""

    eval_interval: int = option(1000, minimum=1, help="Steps between evaluations.")
    eval_iters: int = option(
        0, minimum=0, help="Batches an evaluation takes (0: none; Megatron's default is 100)."
    )
    save: Path | None = option(None, metavar="DIR", help="Save checkpoints into this folder.")
    save_interval: int | None = option(None, minimum=1, help="Steps between checkpoints.")
    async_save: bool = option(False, help="Train on while a checkpoint is being written.")
    checkpoint_checksums: bool = option(
        True,
        help="Write no checksums with a checkpoint, and compare none when one is loaded (not in "
        "Megatron).",
    )
    load: Path | None = option(
        None, metavar="DIR", help="Resume from this folder; start anew while it holds nothing."
    )
    ckpt_step: int | None = option(
        None, minimum=1, help="The step whose checkpoint --load takes (default: the latest)."
    )
    finetune: bool = option(
        False, help="Of --load take the weights alone, and start at step 0 with any data."
    )
    pretrained_checkpoint: Path | None = option(
        None,
        metavar="DIR",
        help="Like --load with --finetune, as long as --load holds nothing to resume from.",
    )
    load_optim: bool = option(
        True,
        off_flag="--no-load-optim",
        help="Resume with fresh optimizer state; weights, schedule and data position are restored.",
    )
    load_rng: bool = option(
        True,
        off_flag="--no-load-rng",
        help="Leave the random generators alone; with HDP there are none to restore.",
    )
    override_opt_param_scheduler: bool = option(
        False, help="Resume under this command's schedule where the checkpoint's is another."
    )
    log_interval: int = option(100, minimum=1, help="Steps between lines of the log.")
    tensorboard_dir: Path | None = option(
        None, metavar="DIR", help="Write TensorBoard scalars into this folder."
    )
