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
        1, minimum=1, help="Sequences per micro-batch. With HDP the plan decides instead."
    )
    global_batch_size: int | None = option(
        None,
        minimum=1,
        maximum=_MOST_SEQUENCES,
        help="Sequences per global batch. Default without HDP: micro-batch size x ranks.",
    )
    rampup_batch_size: tuple[int, ...] = option(
        (),
        metavar="N",
        help="Let the global batch grow: first size, increment, and the number of sequences after "
        "which it reaches --global-batch-size.",
    )
    step_batch_size_schedule: str | None = option(
        None,
        metavar="TEXT",
        help="Global batch sizes over time, instead of --global-batch-size: 0:64 250M:128. The "
        "first number of a pair counts tokens, --seq-length for each sequence.",
    )
    eval_global_batch_size: int | None = option(
        None,
        minimum=1,
        maximum=_MOST_SEQUENCES,
        help="Sequences per evaluation batch. Default: as in a training batch.",
    )
    train_iters: int = option(None, minimum=1, required=True, help="Number of steps to train.")
    seed: int = option(
        1234,
        minimum=0,
        maximum=_MOST_SEED,
        help="Random seed of the weights and of the order of the data.",
    )
    lr: float = option(None, minimum=0.0, required=True, help="Learning rate.")
    min_lr: float = option(0.0, minimum=0.0, help="Minimum learning rate of the schedule.")
    lr_decay_style: str = option(
        "linear",
        choices=("constant", "linear", "cosine"),
        help="Shape of the learning rate's decay.",
    )
    lr_decay_iters: int = option(
        None,
        minimum=1,
        help="Number of steps over which the learning rate decays. Default: --train-iters.",
    )
    lr_warmup_iters: int = option(
        0, minimum=0, help="Number of steps of linear learning rate warm-up."
    )
    lr_warmup_fraction: float | None = option(
        None, minimum=0.0, maximum=1.0, help="Warm-up as a fraction of --lr-decay-iters."
    )
    weight_decay: float = option(0.01, minimum=0.0, help="Weight decay.")
    adam_beta1: float = option(0.9, minimum=0.0, below=1.0, help="Adam's first beta.")
    adam_beta2: float = option(0.999, minimum=0.0, below=1.0, help="Adam's second beta.")
    adam_eps: float = option(1e-8, minimum=0.0, maximum=1.0, help="Adam's epsilon.")
    clip_grad: float = option(
        1.0, minimum=0.0, help="Clip the norm of the gradient to this value. 0: do not clip."
    )
    recompute_granularity: str | None = option(
        None,
        choices=("full", "selective"),
        help="Recompute activations in the backward pass: of whole layers, or of some modules.",
    )
    recompute_modules: tuple[str, ...] | None = option(
        None,
        choices=("core_attn", "layernorm", "mlp", "shared_experts"),
        help="Which modules selective recomputation takes. Without it: core_attn.",
    )
    recompute_method: str | None = option(
        None, choices=("uniform", "block"), help="Which layers full recomputation takes."
    )
    recompute_num_layers: int | None = option(
        None,
        minimum=1,
        help="Layers per recomputed unit (uniform), or recomputed layers in all (block).",
    )


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """Parallelism."""

    tensor_model_parallel_size: int = option(
        1, minimum=1, help="Number of ranks that share each layer."
    )
    sequence_parallel: bool = option(
        False,
        help="Split norms and dropout between tensor-parallel ranks. No effect with one such rank.",
    )
    pipeline_model_parallel_size: int = option(
        1,
        minimum=1,
        help="Number of pipeline stages, with equally many layers unless another flag changes "
        "that.",
    )
    decoder_first_pipeline_num_layers: int | None = option(
        None,
        minimum=1,
        help="Number of layers of the first stage. The other stages share the rest.",
    )
    decoder_last_pipeline_num_layers: int | None = option(
        None, minimum=1, help="Number of layers of the last stage. The other stages share the rest."
    )
    account_for_embedding_in_pipeline_split: bool = option(
        False, help="Count the embedding as a layer of the first stage."
    )
    account_for_loss_in_pipeline_split: bool = option(
        False, help="Count output layer and loss as a layer of the last stage."
    )
    pipeline_model_parallel_layout: str | None = option(
        None,
        metavar="TEXT",
        help="Content of every stage, virtual stages included, in letters: E (embedding), t (a "
        "layer), L (loss), | between stages, *n to repeat. Example: Ett|(ttt|)*2,ttL.",
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None,
        minimum=1,
        help="Number of layers of a virtual stage (interleaved schedule). Needs HDP.",
    )
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None,
        minimum=1,
        help="Number of virtual stages on a rank, instead of "
        "--num-layers-per-virtual-pipeline-stage.",
    )
    use_distributed_optimizer: bool = option(
        False, help="Shard the optimizer state over ranks (ZeRO-1)."
    )
    overlap_grad_reduce: bool = option(False, help="Reduce gradients while the backward pass runs.")
    overlap_param_gather: bool = option(
        False,
        help="Gather updated parameters while the forward pass runs. Needs "
        "--use-distributed-optimizer and --overlap-grad-reduce.",
    )
    ddp_bucket_size: int | None = option(
        None,
        minimum=1,
        maximum=_MOST_PARAMETERS,
        help="Number of parameters in a gradient bucket. Default: Megatron's.",
    )
    distributed_backend: str = option(
        "auto",
        choices=("auto", "nccl", "gloo"),
        help="Communication backend. auto (not in Megatron): nccl on GPUs, gloo on CPUs.",
    )
    distributed_timeout_minutes: int = option(
        10, minimum=1, maximum=_MOST_MINUTES, help="Minutes that a collective may wait for a rank."
    )
    stall_timeout_seconds: float = option(
        None,
        minimum=1,
        maximum=60 * _MOST_MINUTES,
        help="End the job after ranks have waited this many seconds for a rank that makes no "
        "progress (not in Megatron). Default: --distributed-timeout-minutes.",
    )


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Data."""

    data_path: tuple[str, ...] = option(
        (),
        metavar="[WEIGHT] PREFIX",
        help="Path prefixes of the .bin/.idx pairs to train on, or alternating weights (shares of "
        "the tokens) and prefixes.",
    )
    data_args_path: str | None = option(
        None, metavar="FILE", help="Text file that contains the value of --data-path."
    )
    train_data_path: tuple[str, ...] = option(
        (),
        metavar="[WEIGHT] PREFIX",
        help="Like --data-path, for training only, with whole documents.",
    )
    valid_data_path: tuple[str, ...] = option(
        (), metavar="[WEIGHT] PREFIX", help="Like --train-data-path, for validation."
    )
    test_data_path: tuple[str, ...] = option(
        (),
        metavar="[WEIGHT] PREFIX",
        help="Like --train-data-path, for testing. This command does no test run.",
    )
    per_split_data_args_path: str | None = option(
        None,
        metavar="FILE",
        help="JSON file with these lists under the keys train, valid and test.",
    )
    data_cache_path: str | None = option(
        None,
        metavar="DIR",
        help="Folder for files that the processes of a node share: tables of sequences, and "
        "sources tokenised on the fly. Default: each process holds its own tables, and "
        "sources are tokenised into the folder hdp-cache next to the data.",
    )
    sft: bool = option(False, help="Read JSON lines of conversations. Weights are shares of rows.")
    sft_tokenizer_prompt_format: str = option(
        "nemotron-h-aligned",
        metavar="NAME",
        help="Format in which --sft writes a conversation, by Megatron's names.",
    )
    multiple_validation_sets: bool = option(
        False,
        help="Report validation losses by source. HDP always does.",
    )
    split: str = option(
        "969,30,1",
        metavar="A,B,C",
        help="Shares of the documents for training, validation and testing.",
    )
    tokenizer_type: str = option(
        "byte",
        choices=("byte", "HuggingFaceTokenizer", "TikTokenizer"),
        help="Tokenizer of the data. It also gives the size of the vocabulary.",
    )
    tokenizer_model: str | None = option(
        None,
        metavar="PATH|NAME",
        help="Folder (HuggingFace) or encoding (tiktoken) of the tokenizer.",
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Evaluation, checkpoints, logs."""

    eval_interval: int = option(1000, minimum=1, help="Number of steps between evaluations.")
    eval_iters: int = option(
        0,
        minimum=0,
        help="Number of batches per evaluation. 0: no evaluation (Megatron's default is 100).",
    )
    save: Path | None = option(None, metavar="DIR", help="Save checkpoints into this folder.")
    save_interval: int | None = option(None, minimum=1, help="Number of steps between checkpoints.")
    async_save: bool = option(False, help="Continue training while a checkpoint is written.")
    checkpoint_checksums: bool = option(
        True,
        help="Write checksums with each checkpoint and compare them when it is loaded (not in "
        "Megatron).",
    )
    load: Path | None = option(
        None,
        metavar="DIR",
        help="Resume from the checkpoints in this folder. Start from scratch if it holds none.",
    )
    ckpt_step: int | None = option(
        None, minimum=1, help="Step of the checkpoint that --load takes. Default: the latest."
    )
    finetune: bool = option(
        False, help="Load only the weights from --load, and start at step 0 with any data."
    )
    pretrained_checkpoint: Path | None = option(
        None,
        metavar="DIR",
        help="Load only the weights from this folder if --load holds no checkpoint yet.",
    )
    load_optim: bool = option(
        True,
        off_flag="--no-load-optim",
        help="Restore the optimizer state when resuming. Weights, schedule and data position are "
        "always restored.",
    )
    load_rng: bool = option(
        True,
        off_flag="--no-load-rng",
        help="Restore the random number generators when resuming. With HDP there are none to "
        "restore.",
    )
    override_opt_param_scheduler: bool = option(
        False, help="Resume with this command's learning rate schedule instead of the checkpoint's."
    )
    log_interval: int = option(100, minimum=1, help="Number of steps between log lines.")
    tensorboard_dir: Path | None = option(
        None, metavar="DIR", help="Write TensorBoard scalars into this folder."
    )
