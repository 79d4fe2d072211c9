"""The training command's options, under the names and defaults of Megatron's own flags.

A field without ``None`` in its type has a value once `parse_arguments` has returned: it is
required, or derived from others.

Where a name or default differs from Megatron's, the help says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_hdp.megatron.moe_options import MoeOptions, check_moe
from megatron_hdp.options import (
    HdpOptions,
    OptionError,
    OptionParser,
    add_options,
    check_values,
    from_namespace,
    markdown_table,
    option,
    yaml_to_argv,
)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Model."""

    num_layers: int = option(None, minimum=1, required=True, help="Transformer layers.")
    hidden_size: int = option(None, minimum=1, required=True, help="Hidden size.")
    ffn_hidden_size: int = option(
        None, minimum=1, help="MLP size (default: 4 x hidden size, or 8/3 of it with --swiglu)."
    )
    num_attention_heads: int = option(None, minimum=1, required=True, help="Attention heads.")
    group_query_attention: bool = option(False, help="Share keys and values between heads.")
    num_query_groups: int = option(
        None,
        minimum=1,
        help="Key and value heads; implies --group-query-attention (default with it: 1).",
    )
    kv_channels: int = option(
        None, minimum=1, help="Size of a head (default: hidden size / attention heads)."
    )
    seq_length: int = option(
        None, minimum=1, required=True, help="Context length: tokens of the longest sequence."
    )
    max_position_embeddings: int = option(
        None, minimum=1, help="Positions of the model (default: --seq-length)."
    )
    position_embedding_type: str = option(
        "rope", choices=("rope",), help="Position embedding; only rotary is supported."
    )
    rotary_base: int = option(10000, minimum=1, help="Base of the rotary frequencies.")
    rotary_percent: float = option(
        1.0, minimum=0.0, maximum=1.0, help="Share of a head's channels that is rotated."
    )
    normalization: str = option(
        "LayerNorm", choices=("LayerNorm", "RMSNorm"), help="Normalization layer."
    )
    norm_epsilon: float = option(1e-5, minimum=0.0, help="Epsilon of the normalization.")
    swiglu: bool = option(False, help="Gated linear units with SiLU instead of GELU.")
    untie_embeddings_and_output_weights: bool = option(
        False, help="Give the output layer its own weights."
    )
    add_bias_linear: bool = option(
        True, off_flag="--disable-bias-linear", help="Remove the bias from linear layers."
    )
    add_qkv_bias: bool = option(False, help="Bias in the QKV projection only.")
    qk_layernorm: bool = option(False, help="Normalize queries and keys.")
    init_method_std: float = option(0.02, minimum=0.0, help="Standard deviation of the weights.")
    attention_dropout: float = option(
        0.1, minimum=0.0, maximum=1.0, help="Dropout of attention; must be 0 with HDP."
    )
    hidden_dropout: float = option(
        0.1,
        minimum=0.0,
        maximum=1.0,
        help="Dropout of hidden states; with HDP, losses depend on the plan unless it is 0.",
    )
    make_vocab_size_divisible_by: int = option(
        128, minimum=1, help="Pad the vocabulary to a multiple of this."
    )
    bf16: bool = option(False, help="Train in bfloat16 (default: float32).")
    fp64: bool = option(
        False, help="Train in float64 on CPUs, to show that two runs are equal (not in Megatron)."
    )


@dataclass(frozen=True, kw_only=True)
class OptimizationOptions:
    """Optimization."""

    micro_batch_size: int = option(
        1, minimum=1, help="Sequences in a micro-batch; with HDP the plan decides instead."
    )
    global_batch_size: int | None = option(
        None, minimum=1, help="Sequences in a global batch (without HDP: micro-batch x ranks)."
    )
    train_iters: int = option(None, minimum=1, required=True, help="Steps to train.")
    seed: int = option(1234, minimum=0, help="Seed of weights and of the order of the data.")
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
    adam_beta1: float = option(0.9, minimum=0.0, maximum=1.0, help="Adam's first beta.")
    adam_beta2: float = option(0.999, minimum=0.0, maximum=1.0, help="Adam's second beta.")
    adam_eps: float = option(1e-8, minimum=0.0, help="Adam's epsilon.")
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
        1, minimum=1, help="Pipeline stages; each holds the same number of layers."
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None, minimum=1, help="Layers of a virtual stage (interleaved schedule); refused."
    )
    use_distributed_optimizer: bool = option(False, help="Shard the optimizer state (ZeRO-1).")
    overlap_grad_reduce: bool = option(False, help="Reduce gradients while backward runs.")
    ddp_bucket_size: int | None = option(
        None, minimum=1, help="Parameters in a gradient bucket (default: Megatron's)."
    )
    distributed_backend: str = option(
        "auto",
        choices=("auto", "nccl", "gloo"),
        help="Communication; auto (not in Megatron) is nccl on GPUs and gloo on CPUs.",
    )
    distributed_timeout_minutes: int = option(
        10, minimum=1, help="How long a collective may wait for a rank."
    )
    stall_timeout_seconds: float = option(
        None,
        minimum=1,
        help="End the job when ranks have waited this long for one that stands still (not in "
        "Megatron; default: --distributed-timeout-minutes).",
    )


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Data."""

    data_path: tuple[str, ...] = option(
        (), required=True, metavar="PREFIX", help="Prefix of the .bin/.idx pair to train on."
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


@dataclass(frozen=True, kw_only=True)
class TrainingArguments(
    HdpOptions,
    RunOptions,
    DataOptions,
    ParallelOptions,
    OptimizationOptions,
    MoeOptions,
    ModelOptions,
):
    """All options of the training command, checked, defaults that depend on others filled in."""


_ALIGNED_STRATEGIES = ("auto", "pp-balance", "static")  # of pipelines, as they are planned

GROUPS = (
    HdpOptions,
    ModelOptions,
    MoeOptions,
    OptimizationOptions,
    ParallelOptions,
    DataOptions,
    RunOptions,
)


def build_parser() -> OptionParser:
    """Return the training command's parser."""
    parser = OptionParser(
        prog="pretrain_gpt",
        description="Train a megatron.core GPT, with or without hybrid data parallelism. "
        "Each switch has an opposite, --no-..., that wins over a --config file.",
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="YAML file whose keys are flags' names; flags win over it, later files over earlier. "
        "Its key config names further files, relative to it, over which it wins.",
    )
    for group in GROUPS:
        add_options(parser, group)
    return parser


def parse_arguments(argv: Sequence[str]) -> TrainingArguments:
    """Return the options of a command line, its ``--config`` files included.

    Raises:
        OptionError: an unknown, missing or unusable flag or key.
    """
    parser = build_parser()
    config = OptionParser(add_help=False)
    config.add_argument("--config", action="append", default=[], type=Path)
    paths, _ = config.parse_known_args(argv)
    from_files = [text for path in paths.config for text in yaml_to_argv(path, parser)]
    namespace = parser.parse_args(from_files)
    if namespace.config:
        raise OptionError("'config' stands in a section of a --config file: move it to the left")
    namespace = parser.parse_args(argv, namespace)
    arguments = from_namespace(TrainingArguments, namespace)
    check_values(arguments)
    _check_run(arguments)
    arguments = _with_derived_defaults(arguments)
    _check_model(arguments)
    _check_parallel(arguments)
    check_moe(arguments)
    _check_schedule(arguments)
    arguments.validate(
        global_batch_size=arguments.global_batch_size,
        attention_dropout=arguments.attention_dropout,
        train_iters=arguments.train_iters,
    )
    return arguments


def _with_derived_defaults(args: TrainingArguments) -> TrainingArguments:
    """Fill in what Megatron derives from other flags, in Megatron's way."""
    hidden, heads = args.hidden_size or 0, args.num_attention_heads or 1
    if args.kv_channels is None and hidden % heads:
        raise OptionError(
            f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}: "
            "change one of them or give --kv-channels"
        )
    ffn_hidden_size = hidden * 8 // 3 // 64 * 64 if args.swiglu else 4 * hidden
    grouped = args.group_query_attention or args.num_query_groups is not None
    decay_iters = args.lr_decay_iters or args.train_iters or 1
    moe_ffn_hidden_size = args.moe_ffn_hidden_size
    if args.num_experts is not None and moe_ffn_hidden_size is None:
        moe_ffn_hidden_size = args.ffn_hidden_size or max(ffn_hidden_size, 64)
    warmup_iters = args.lr_warmup_iters or int((args.lr_warmup_fraction or 0) * decay_iters)
    return replace(
        args,
        ffn_hidden_size=args.ffn_hidden_size or max(ffn_hidden_size, 64),
        kv_channels=args.kv_channels or hidden // heads,
        group_query_attention=grouped,
        num_query_groups=(args.num_query_groups or 1) if grouped else heads,
        max_position_embeddings=args.max_position_embeddings or args.seq_length,
        lr_decay_iters=decay_iters,
        lr_warmup_iters=warmup_iters,
        stall_timeout_seconds=args.stall_timeout_seconds or 60.0 * args.distributed_timeout_minutes,
        moe_ffn_hidden_size=moe_ffn_hidden_size,
        expert_tensor_parallel_size=(
            args.expert_tensor_parallel_size or args.tensor_model_parallel_size
        ),
        sequence_parallel=args.sequence_parallel and args.tensor_model_parallel_size > 1,
    )


def _check_model(args: TrainingArguments) -> None:
    heads, groups = args.num_attention_heads or 1, args.num_query_groups or 1
    tensor_ranks = args.tensor_model_parallel_size
    if heads % groups:
        raise OptionError(
            f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}: "
            "change one of them"
        )
    if heads % tensor_ranks or groups % tensor_ranks:
        raise OptionError(
            f"--num-attention-heads {heads} and --num-query-groups {groups} must be multiples of "
            f"--tensor-model-parallel-size {tensor_ranks}: use fewer tensor-parallel ranks"
        )
    if (args.max_position_embeddings or 0) < (args.seq_length or 0):
        raise OptionError(
            f"--max-position-embeddings {args.max_position_embeddings} is less than --seq-length "
            f"{args.seq_length}: raise it or leave it out"
        )
    if args.bf16 and args.fp64:
        raise OptionError("found both --bf16 and --fp64, expected one of them at most")
    full = args.recompute_granularity == "full"
    if full != (args.recompute_method is not None):
        raise OptionError(
            "--recompute-granularity full and --recompute-method go together: give both or neither"
        )


def _check_parallel(args: TrainingArguments) -> None:
    stages = args.pipeline_model_parallel_size
    if (args.num_layers or 1) % stages:
        raise OptionError(
            f"--num-layers {args.num_layers} is not a multiple of --pipeline-model-parallel-size "
            f"{stages}: every stage holds the same number of layers, change one of them"
        )
    if args.num_layers_per_virtual_pipeline_stage is not None:
        raise OptionError(
            "--num-layers-per-virtual-pipeline-stage: the interleaved schedule is not supported. "
            "It gives all micro-batches one activation shape and wants their number to be a "
            "multiple of the stages on every pipeline; here shapes and numbers come from the plan, "
            "through the plain 1F1B schedule: leave it out"
        )
    check_layout(args)


def check_layout(args: TrainingArguments) -> None:
    """Checks HDP's options with how the model is laid out over ranks.

    Raises:
        OptionError: says what was found, what was expected and the remedy.
    """
    stages, tensor_ranks = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    capacity = args.hdp_tokens_per_rank
    if args.sequence_parallel and capacity and capacity % tensor_ranks:
        raise OptionError(
            f"--hdp-tokens-per-rank {capacity} is not a multiple of --tensor-model-parallel-size "
            f"{tensor_ranks}, which share the tokens with --sequence-parallel: use "
            f"{capacity // tensor_ranks * tensor_ranks or tensor_ranks}"
        )

    layers = (args.num_layers or 1) // stages
    if args.hdp_offload != "off" and layers <= 2:
        raise OptionError(
            f"--hdp-offload {args.hdp_offload} has no effect with {layers} layers on a rank: "
            "two layers' activations always stay on the device: leave it out, or use fewer "
            "pipeline stages"
        )

    drawn = "--hdp-trace" if args.hdp_trace else "--hdp-plot-plan" if args.hdp_plot_plan else None
    if stages > 1 and drawn and args.hdp_strategy not in _ALIGNED_STRATEGIES:
        raise OptionError(
            f"{drawn} with pipeline stages needs --hdp-strategy "
            f"{' or '.join(_ALIGNED_STRATEGIES)}: found {args.hdp_strategy}, whose plans run with "
            "padding that they do not show"
        )


def _check_schedule(args: TrainingArguments) -> None:
    decay_iters = args.lr_decay_iters or 1
    if args.lr_warmup_iters >= decay_iters:
        raise OptionError(
            f"the warm-up takes {args.lr_warmup_iters} steps, expected fewer than --lr-decay-iters "
            f"({decay_iters}; --train-iters unless given): lower --lr-warmup-iters or -fraction"
        )
    if args.min_lr > (args.lr or 0):
        raise OptionError(f"--min-lr {args.min_lr} is greater than --lr {args.lr}: lower it")


def _check_run(args: TrainingArguments) -> None:
    if len(args.data_path) != 1:
        raise OptionError(
            f"--data-path: found {len(args.data_path)} values, expected one prefix (mixtures "
            "are not supported): preprocess all input into one pair of files"
        )
    if (args.tokenizer_type == "byte") != (args.tokenizer_model is None):
        expected = "no --tokenizer-model" if args.tokenizer_type == "byte" else "--tokenizer-model"
        raise OptionError(f"--tokenizer-type {args.tokenizer_type} goes with {expected}")
    if args.lr_warmup_fraction is not None and args.lr_warmup_iters:
        raise OptionError("found both --lr-warmup-fraction and --lr-warmup-iters: keep one")
    if args.hdp_plot_plan and args.hdp_plot_step > (args.train_iters or 0):
        raise OptionError(
            f"--hdp-plot-step {args.hdp_plot_step} is beyond --train-iters {args.train_iters}, so "
            "nothing would be drawn: lower it"
        )
    if args.save is None and (args.save_interval is not None or args.async_save):
        flag = "--async-save" if args.save_interval is None else "--save-interval"
        raise OptionError(f"{flag} needs --save DIR: give the folder to save into")
    if args.load is None and (args.finetune or args.ckpt_step is not None):
        flag = "--finetune" if args.finetune else "--ckpt-step"
        raise OptionError(f"{flag} needs --load DIR: give the folder to load from")


def markdown_tables() -> str:
    """Return the tables of all flags, one Markdown section a group."""
    sections = [
        f"### {(group.__doc__ or '').rstrip('.')}\n\n{markdown_table(group)}" for group in GROUPS
    ]
    return "\n".join(sections)
