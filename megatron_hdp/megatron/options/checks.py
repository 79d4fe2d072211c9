"""Checks options that depend on each other: an error says what was found, expected and the remedy.

Every check here raises `OptionError`.
"""

from dataclasses import replace
from typing import Any

from megatron_hdp.megatron.options.arguments import (
    ON_PIPELINES,
    TrainingArguments,
    counted_layers,
    expert_domain_size,
    num_model_chunks,
    planned_layers,
    stage_split,
)
from megatron_hdp.megatron.options.hybrid import HybridArguments
from megatron_hdp.options import OptionError, flag_of, no_effect, require_multiple
from megatron_hdp.planner.stages import StageSplit
from megatron_hdp.strategies import AUTO, resolved

_DATA_FLAGS = (
    "data_path",
    "data_args_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "per_split_data_args_path",
)


def check_model(args: TrainingArguments) -> None:
    """Checks the model's shape, derived defaults filled in."""
    heads, groups = args.num_attention_heads or 1, args.num_query_groups or 1
    tensor_ranks = args.tensor_model_parallel_size
    require_multiple(args, "num_attention_heads", "num_query_groups")
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
    if args.swiglu and args.quick_geglu:
        raise OptionError("found both --swiglu and --quick-geglu, expected one of them at most")
    for name, off in (("activation_func_clamp_value", None), ("glu_linear_offset", 0.0)):
        if getattr(args, name) != off and not (args.swiglu or args.quick_geglu):
            raise no_effect(flag_of(name), "--swiglu or --quick-geglu")
    full = args.recompute_granularity == "full"
    if full != (args.recompute_method is not None):
        raise OptionError(
            "--recompute-granularity full and --recompute-method go together: give both or neither"
        )
    if args.recompute_modules is not None and args.recompute_granularity != "selective":
        raise no_effect("--recompute-modules", "--recompute-granularity selective")


def check_parallel(args: TrainingArguments) -> None:
    """Checks how the model is laid out over ranks."""
    _check_layers_of_chunks(args)
    split = stage_split(args)
    _check_virtual_stages(args, split)
    _check_units(args, split)
    check_layout(args)
    needed = (args.use_distributed_optimizer, args.overlap_grad_reduce)
    if args.overlap_param_gather and not all(needed):
        raise no_effect(
            "--overlap-param-gather", "--use-distributed-optimizer --overlap-grad-reduce"
        )


_VIRTUAL = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
)


def _check_virtual_stages(args: TrainingArguments, split: StageSplit) -> None:
    """Checks how a pipeline stage's layers are cut into model chunks."""
    given = [name for name in _VIRTUAL if getattr(args, name) is not None]
    chunks = num_model_chunks(args)
    if not given or (given == ["pipeline_model_parallel_layout"] and chunks == 1):
        return
    flags = [flag_of(name) for name in given]
    if len(given) > 1:
        raise OptionError(f"found both {' and '.join(flags)}, expected one of them at most")
    found = f"{flags[0]} {getattr(args, given[0])}"
    stages = args.pipeline_model_parallel_size
    if stages == 1:
        raise OptionError(
            f"{found} without pipeline stages: leave it out, or raise "
            "--pipeline-model-parallel-size"
        )
    if chunks == 1:
        raise OptionError(
            f"{found} makes one virtual stage of the {split.most} layers of a pipeline stage, "
            "which is the plain schedule: leave it out, or choose at least two"
        )
    if not args.hybrid_data_parallel:
        raise OptionError(
            f"{found} goes with --hybrid-data-parallel in this command: add it, or train with "
            "Megatron-LM's script"
        )


def _check_layers_of_chunks(args: TrainingArguments) -> None:
    """Megatron reads layers of a virtual stage only where all stages have equally many."""
    of_chunk = args.num_layers_per_virtual_pipeline_stage
    if of_chunk is None:
        return
    found = f"--num-layers-per-virtual-pipeline-stage {of_chunk}"
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if first is not None or last is not None:
        flag = "first" if first is not None else "last"
        raise OptionError(
            f"{found} with --decoder-{flag}-pipeline-num-layers, whose stages differ: use "
            "--num-virtual-stages-per-pipeline-rank instead"
        )
    stages = args.pipeline_model_parallel_size
    counted = counted_layers(args)
    of_stage, rest = divmod(counted, stages)
    if stages > 1 and not rest and of_stage % of_chunk:
        ends = counted - (args.num_layers or 1)
        more = f" + {ends} that count as layers" if ends else ""
        raise OptionError(
            f"{found} does not divide the {of_stage} layers of a pipeline stage "
            f"(--num-layers {args.num_layers}{more} / --pipeline-model-parallel-size {stages}): "
            "every virtual stage needs the same number of layers, change one of the numbers"
        )


def _check_units(args: TrainingArguments, split: StageSplit) -> None:
    """Megatron recomputes a part's layers in whole units, and fails on a rest."""
    unit = args.recompute_num_layers or 1
    if args.recompute_method != "uniform":
        return
    rest = next((layers for layers in split.layers if layers % unit), None)
    if rest is not None:
        to_divide = " and ".join(map(str, sorted(set(split.layers) - {0})))
        raise OptionError(
            f"--recompute-num-layers {unit} does not divide the {rest} layers of a stage, and "
            "--recompute-method uniform recomputes whole units: choose a number that divides "
            f"{to_divide}, or --recompute-method block"
        )


def check_layout(args: TrainingArguments) -> None:
    """Checks HDP's options with how the model is laid out over ranks."""
    stages, tensor_ranks = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    capacity = args.hdp_tokens_per_rank
    if args.sequence_parallel and capacity and capacity % tensor_ranks:
        raise OptionError(
            f"--hdp-tokens-per-rank {capacity} is not a multiple of --tensor-model-parallel-size "
            f"{tensor_ranks}, which share the tokens with --sequence-parallel: use "
            f"{capacity // tensor_ranks * tensor_ranks or tensor_ranks}"
        )

    layers = planned_layers(args)
    if args.hdp_offload != "off" and layers <= 2 and not args.streams:
        raise OptionError(
            f"--hdp-offload {args.hdp_offload} has no effect with {layers} layers on a rank: "
            "two layers' activations always stay on the device: leave it out, or use fewer "
            "pipeline stages"
        )

    _check_parts(args)
    _check_streams(args)
    _check_recompute(args)
    drawn = "--hdp-trace" if args.hdp_trace else "--hdp-plot-plan" if args.hdp_plot_plan else None
    if stages > 1 and drawn and args.hdp_strategy not in ON_PIPELINES:
        raise OptionError(
            f"{drawn} with pipeline stages needs --hdp-strategy "
            f"{' or '.join(ON_PIPELINES)}: found {args.hdp_strategy}, whose plans do not "
            "show the padding that runs with them"
        )


def _check_parts(args: TrainingArguments) -> None:
    """Checks which options work together with micro-batches that run in parts."""
    if args.hdp_sequence_parts in (None, 1):
        return
    if args.pipeline_model_parallel_size == 1:
        raise no_effect(
            f"--hdp-sequence-parts {args.hdp_sequence_parts}", "--pipeline-model-parallel-size"
        )
    if args.hdp_strategy not in ON_PIPELINES:
        raise OptionError(
            f"--hdp-sequence-parts {args.hdp_sequence_parts}: found --hdp-strategy "
            f"{args.hdp_strategy}, which does not work together with micro-batches in parts: leave "
            "one of them out"
        )


_RECOMPUTING = (AUTO, "dp-balance", "pp-balance")
"""Strategies that plan recomputation."""


def _check_recompute(args: TrainingArguments) -> None:
    """Checks which options work together with recomputation that is planned."""
    if args.hdp_recompute == "off":
        return
    ranks = expert_domain_size(args)
    refused = {
        "--recompute-granularity full, which recomputes all": args.recompute_granularity == "full",
        f"{ranks} HDP ranks that share experts": ranks > 1,
        f"--hdp-strategy {args.hdp_strategy}": args.hdp_strategy not in _RECOMPUTING,
    }
    found = [name for name, is_found in refused.items() if is_found]
    if found:
        raise OptionError(
            f"--hdp-recompute {args.hdp_recompute}: found {found[0]}; they do not work together: "
            "leave one of them out"
        )


def _streaming(args: TrainingArguments) -> tuple[str, ...]:
    """The strategies that plan streams for such ranks."""
    shares = expert_domain_size(args) > 1
    found = resolved(AUTO, stages=args.pipeline_model_parallel_size, shares_experts=shares)
    return AUTO, found, "static"


def _check_streams(args: TrainingArguments) -> None:
    """Checks which options work together with streams."""
    if not args.streams:
        if args.hdp_stream_sums != "float32":
            raise no_effect(
                f"--hdp-stream-sums {args.hdp_stream_sums}", "--hdp-long-sequence stream"
            )
        return
    expected = _streaming(args)
    if args.hdp_strategy not in expected:
        raise OptionError(
            f"--hdp-long-sequence stream: found --hdp-strategy {args.hdp_strategy}; it plans no "
            f"streams for these ranks: expected one of {', '.join(expected)}"
        )


def check_schedule(args: TrainingArguments) -> None:
    """Checks the learning rate's schedule."""
    decay_iters = args.lr_decay_iters or 1
    if args.lr_warmup_iters >= decay_iters:
        raise OptionError(
            f"the warm-up takes {args.lr_warmup_iters} steps, expected fewer than --lr-decay-iters "
            f"({decay_iters}; default: --train-iters): lower --lr-warmup-iters or -fraction"
        )
    if args.min_lr > (args.lr or 0):
        raise OptionError(f"--min-lr {args.min_lr} is greater than --lr {args.lr}: lower it")


def check_mtp(args: TrainingArguments) -> None:
    """Checks which options work together with multi-token prediction."""
    if args.mtp_num_layers is None:
        if args.mtp_loss_scaling_factor != 0.1:
            raise no_effect("--mtp-loss-scaling-factor", "--mtp-num-layers")
        return
    stages, unit = args.pipeline_model_parallel_size, args.recompute_num_layers
    refused = {
        "no --hybrid-data-parallel": not args.hybrid_data_parallel,
        "--no-hdp-fused-loss": not args.hdp_fused_loss,
        "--window-size": args.window_size is not None,
        "--no-rope-freq": args.no_rope_freq is not None,
        "--pipeline-model-parallel-layout": args.pipeline_model_parallel_layout is not None
        and not isinstance(args, HybridArguments),
        "virtual stages": num_model_chunks(args) > 1,
        "--recompute-method block": args.recompute_method == "block",
        f"--recompute-num-layers {unit}": args.recompute_method == "uniform" and unit != 1,
        "pipeline stages and a tied output layer": stages > 1
        and not args.untie_embeddings_and_output_weights,
    }
    found = [name for name, is_found in refused.items() if is_found]
    if found:
        raise OptionError(
            f"--mtp-num-layers {args.mtp_num_layers}: found {found[0]}, which does not work "
            "together with multi-token prediction: leave one of them out"
        )


def check_data(args: Any) -> None:
    """Checks that the flags, of `TrainingArguments` or Megatron's, name data in one way."""
    given = [name for name in _DATA_FLAGS if getattr(args, name, None)]
    if args.hdp_data is not None and given:
        raise OptionError(
            f"found --hdp-data and {', '.join(map(flag_of, given))}, expected only one of them: "
            "that file names all data"
        )
    if args.hdp_data is None and not given:
        raise OptionError("--data-path is missing: name the data with it or with --hdp-data")


def check_run(args: TrainingArguments) -> None:
    """Checks what a run reads, writes and resumes from, before defaults are derived."""
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


def virtual_stage_choices(args: TrainingArguments) -> dict[int, TrainingArguments]:
    """The same run with each number of virtual stages per rank that its layers allow.

    Empty without pipeline stages, and with a layout, which fixes the number. `args` are checked.
    """
    is_fixed = args.pipeline_model_parallel_layout is not None
    if args.pipeline_model_parallel_size == 1 or is_fixed:
        return {}
    choices = {}
    most = stage_split(args).most + 1  # embedding or loss may count as a layer
    for chunks in range(1, most + 1):
        changed = replace(
            args,
            num_layers_per_virtual_pipeline_stage=None,
            num_virtual_stages_per_pipeline_rank=chunks if chunks > 1 else None,
        )
        try:
            check_parallel(changed)
        except OptionError:
            continue  # the layers do not allow this number
        choices[chunks] = changed
    return choices
