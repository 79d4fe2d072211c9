"""HDP's flags in Megatron-LM's own parser, and the flags of Megatron that HDP does not support.

Every check raises `OptionError`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from megatron_hdp.megatron.lm.releases import installed_version, release_of
from megatron_hdp.megatron.model import (
    check_recomputation,
    fused_kernel_can_count,
    fused_kernel_is_there,
)
from megatron_hdp.megatron.options import (
    HybridArguments,
    MoeOptions,
    ParallelOptions,
    TrainingArguments,
    check_data,
    check_dispatcher,
    check_fp8,
    check_latent_ring,
    check_layout,
    check_media,
    check_moe,
    check_mtp,
    check_preferences,
    check_windows,
    given_preferences,
    growth_of,
    num_model_chunks,
    options_of_pattern,
    require_known_letters,
    sequences_of,
)
from megatron_hdp.megatron.parallel import compute_device
from megatron_hdp.options import (
    HdpOptions,
    MediaOptions,
    OptionError,
    PreferenceOptions,
    add_options,
    check_values,
    flag_of,
    no_effect,
)
from megatron_hdp.runtime.epochs import keys, nccl

LEFT_OUT = (
    "hdp_global_batch_tokens",  # Megatron counts --global-batch-size samples a step
    "vocab_size",  # Megatron pads its tokenizer's
)
_STALL = "stall_timeout_seconds"

_OWN_RINGS = "HDP forms its own rings"
_DOCUMENTS = "HDP trains on whole documents"
_SHAPES = "it needs one activation shape, but under HDP every micro-batch has its own"
_GPT = "HDP trains GPT models with rotary position embeddings or none"
_EXPERTS = "HDP trains experts of the hidden size, with their own weights, chosen at every step"
_MTP = "HDP's MTP layers have their own weights, and the model learns from their loss"
_ROUTING = "its effect depends on which tokens share a micro-batch, so on the plan"
_FSDP = "HDP reduces gradients with Megatron's DDP and distributed optimizer"
_SCHEDULE = "it changes Megatron's schedule, but under HDP a step follows its plan"
_PRETRAINS = "HDP trains on the cross entropy of the next token"

REFUSED: dict[str, tuple[Any, str]] = {
    "context_parallel_size": (1, _OWN_RINGS),
    "hierarchical_context_parallel_sizes": (None, _OWN_RINGS),
    "hybrid_context_parallel": (False, _OWN_RINGS),
    "use_megatron_fsdp": (False, _FSDP),
    "use_torch_fsdp2": (False, _FSDP),
    "num_distributed_optimizer_instances": (1, _FSDP),
    "tensor_parallel_num_weight_shards": (None, _FSDP),
    "expert_tensor_parallel_num_weight_shards": (None, _FSDP),
    "overlap_param_gather_with_optimizer_step": (
        False,
        "parameters are gathered before the first micro-batch",
    ),
    "distrib_optim_fully_reshardable_mem_efficient": (
        False,
        "it saves shifted optimizer states when gradients have more than one bucket",
    ),
    "moe_expert_capacity_factor": (None, _ROUTING),
    "moe_router_force_load_balancing": (False, _ROUTING),
    "moe_router_force_biased": (None, _ROUTING),
    "moe_input_jitter_eps": (None, _ROUTING),
    "moe_enable_routing_replay": (False, _EXPERTS),
    "moe_use_upcycling": (False, _EXPERTS),
    "moe_latent_size": (None, _EXPERTS),
    "moe_use_legacy_grouped_gemm": (False, "HDP needs experts with their own weights"),
    "overlap_moe_expert_parallel_comm": (False, _SHAPES),
    "cuda_graph_impl": ("none", _SHAPES),
    "enable_cuda_graph": (False, _SHAPES),
    "external_cuda_graph": (False, _SHAPES),
    "optimizer_cuda_graph": (False, "HDP captures no CUDA graphs"),
    "moe_paged_stash": (False, _SCHEDULE),
    "moe_expert_rank_capacity_factor": (None, _SCHEDULE),
    "tp_comm_overlap": (False, _SHAPES),
    "fine_grained_activation_offloading": (False, "use --hdp-offload"),
    "cpu_offloading_num_layers": (0, "use --hdp-offload"),
    "mtp_use_repeated_layer": (False, _MTP),
    "mtp_detach_heads": (False, _MTP),
    "cache_mla_latents": (False, "it serves inference"),
    "mla_down_proj_fusion": (False, "HDP needs projections with their own weights"),
    "experimental_attention_variant": (None, _GPT),
    "hybrid_override_pattern": (None, "give --hybrid-layer-pattern, from 0.18 on"),
    "is_hybrid_model": (False, "give --hybrid-layer-pattern, from 0.18 on"),
    "heterogeneous_layers_config_path": (None, _GPT),
    "use_legacy_models": (False, _GPT),
    "position_embedding_type": (("rope", "yarn", "none"), _GPT),
    "use_mup": (False, _GPT),
    "batch_invariant_mode": (False, "how HDP splits keys between blocks depends on the plan"),
    "qk_clip": (False, "HDP's attention keeps no logits"),
    "log_max_attention_logit": (False, "HDP's attention keeps no logits"),
    "fp16": (False, "use --bf16"),
    "loss_scale": (None, "bfloat16 has the range of float32"),
    "fp4": (None, "use --bf16"),
    "te_precision_config_file": (None, "it gives FP8 to single layers: use --fp8-format"),
    "perform_rl_step": (False, _PRETRAINS),
    "freeze_all_layers": (False, "use --hdp-frozen, which names weights"),
    "logits_save_dir": (None, _PRETRAINS),
    "logits_load_dir": (None, _PRETRAINS),
    "inprocess_restart": (False, "use torchrun --max-restarts"),
    "mock_data": (False, _DOCUMENTS),
    "fim_data": (False, _DOCUMENTS),
    "full_validation": (False, "give --eval-iters"),
    "reset_position_ids": (False, "each document has its own positions already"),
    "reset_attention_mask": (False, "each document has its own attention already"),
    "eod_mask_loss": (False, "every token of a document but the last predicts the next"),
    "dataloader_inter_document_masking": (False, "each document has its own attention already"),
    "iterations_to_skip": ([], "HDP draws a step's sequences when it trains on them"),
    "phase_transition_iterations": (None, "give phases in the file of --hdp-data"),
    "decrease_batch_size_if_needed": (
        False,
        "which sequences form a step must not depend on the number of ranks",
    ),
    "save_wgrads_interval": (None, "HDP reduces gradients once, at the end of a step"),
    "save_dgrads_interval": (None, "HDP reduces gradients once, at the end of a step"),
}
"""By attribute of Megatron's arguments, if the release has it: the only value that HDP supports, or
a tuple of those, and why."""

_SURVIVING: dict[str, Any] = {
    "non_persistent_ckpt_type": None,
    "profile": False,
    "log_straggler": False,
    "log_energy": False,
    "log_num_zeros_in_grad": False,
    "wandb_project": "",
    "enable_ft_package": False,
    "use_tp_pp_dp_mapping": False,
    "use_nccl_ub": False,
    "use_sharp": False,
}
"""The same for ``--hdp-survive``: what these begin is bound to the ranks that were there."""

_ANY_PERCENT = re.compile(r"%%|%\(\w+\)|%")


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds HDP's flags to Megatron's parser, and lets its ``--help`` be printed.

    Megatron 0.18 and 0.19 have a help text with a bare ``%``, on which argparse fails.
    """
    add_options(parser, HdpOptions, LEFT_OUT)
    add_options(parser, PreferenceOptions)
    add_options(parser, MediaOptions)
    theirs = [item.name for item in fields(ParallelOptions) if item.name != _STALL]
    add_options(parser, ParallelOptions, theirs)
    for action in parser._actions:
        if action.help:
            action.help = _ANY_PERCENT.sub(
                lambda found: "%%" if found.group() == "%" else found.group(), action.help
            )
    return parser


def refuse_in_yaml(args: Any, command_line: Sequence[str]) -> None:
    """Refuses HDP in a run whose arguments Megatron reads from a file, ignoring all flags.

    Args:
        args: what Megatron read; gets ``hybrid_data_parallel = False``.
        command_line: the flags that it ignores.
    """
    if getattr(args, "hybrid_data_parallel", False) or "--hybrid-data-parallel" in command_line:
        raise OptionError(
            "--yaml-cfg does not go with --hybrid-data-parallel: with it Megatron ignores all "
            "flags and checks none: give all arguments as flags"
        )
    args.hybrid_data_parallel = False


def check(args: argparse.Namespace) -> None:
    """Checks HDP's flags with Megatron's, before Megatron derives anything from its own."""
    if not args.hybrid_data_parallel and (given := given_preferences(args)):
        raise no_effect(flag_of(given[0]), "--hybrid-data-parallel")
    check_media(args)
    names = [item.name for item in fields(HdpOptions) if item.name not in LEFT_OUT]
    options = HdpOptions(**{name: getattr(args, name) for name in names})
    options.validate(
        global_batch_size=sequences_of(args),
        attention_dropout=args.attention_dropout,
        train_iters=args.train_iters or 0,
    )
    if not options.hybrid_data_parallel:
        return
    check_values(ParallelOptions(stall_timeout_seconds=args.stall_timeout_seconds))
    for name, (wanted, why) in REFUSED.items():
        several = isinstance(wanted, tuple)
        found = getattr(args, name, wanted)
        is_wanted = found == wanted or (several and found in wanted)
        if not is_wanted and not (found is None or found is False):
            needed = " or ".join(map(str, wanted)) if several else wanted
            raise OptionError(
                f"{flag_of(name)} (found {found}) does not go with --hybrid-data-parallel, which "
                f"needs {needed}: {why}"
            )
    if options.hdp_survive:
        _check_survival(args)
    _check_kind(args)
    if options.lora_rank is not None:
        _check_adapters(args)
    _check_positions(args)
    _check_growth(args)
    _check_attention(getattr(args, "attention_backend", None))
    is_latent = getattr(args, "multi_latent_attention", False)
    check_latent_ring(is_latent, options.hdp_mla_ring)
    if is_latent:
        _check_latent_attention(args)
    check_data(args)
    check_fp8(args, options)
    check_dispatcher(args, options)
    if getattr(args, "moe_grouped_gemm", False):
        _check_grouped_gemm(args.transformer_impl)
    if "moe" in (getattr(args, "recompute_modules", None) or ()):
        raise OptionError(
            "--recompute-modules moe does not go with --hybrid-data-parallel: Megatron would run "
            "the router again outside its layer, without its micro-batch: use --recompute-modules "
            "moe_act, mlp or shared_experts, or --recompute-granularity full"
        )
    check_recomputation(args)


def _check_survival(args: argparse.Namespace) -> None:
    """Refuses what does not survive the loss of ranks, and a job without an agent."""
    for name, wanted in _SURVIVING.items():
        found = getattr(args, name, wanted)
        if found not in (wanted, None):
            raise OptionError(
                f"--hdp-survive: found {flag_of(name)} ({found}), expected none, because what it "
                "begins is bound to the ranks that were there: leave it out"
            )
    if getattr(args, "async_save", False) and getattr(args, "async_strategy", "mcore") != "mcore":
        raise OptionError(
            f"--hdp-survive: found --async-save with --async-strategy {args.async_strategy}, "
            "expected mcore, because a writer of NVIDIA's package does not end with its rank: add "
            "--async-strategy mcore"
        )
    try:
        keys.address_of_agent()
        if compute_device().type == "cuda":
            nccl.prepare()
    except ValueError as error:
        raise OptionError(str(error)) from None


def _check_kind(args: argparse.Namespace) -> None:
    """Refuses blocks of hybrids whose tokens HDP cannot place, and specifications of other GPTs."""
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if pattern is not None:
        require_known_letters(pattern)
    elif getattr(args, "spec", None) is not None:
        raise OptionError(
            f"--spec: found {args.spec} without --hybrid-layer-pattern, expected none: {_GPT}, or "
            "hybrids: leave it out"
        )


def _check_adapters(args: argparse.Namespace) -> None:
    """Refuses what does not go with checkpoints of adapters alone."""
    if not getattr(args, "pretrained_checkpoint", None):
        return
    found = getattr(args, "ckpt_format", "torch_dist")
    if found != "torch_dist":
        raise OptionError(
            f"--lora-rank: found --pretrained-checkpoint beside it and --ckpt-format {found}, "
            "expected torch_dist, because checkpoints hold adapters alone then: leave it out"
        )
    if getattr(args, "finetune", False):
        raise OptionError(
            "--lora-rank: found --pretrained-checkpoint and --finetune beside it, expected one of "
            "them: adapters begin at zero, or --load resumes them; leave --finetune out"
        )


def _check_positions(args: argparse.Namespace) -> None:
    """Refuses scalings for which Megatron-LM has flags that it does not hand to the model."""
    if getattr(args, "position_embedding_type", None) == "yarn" and not hasattr(
        args, "yarn_beta_fast"
    ):
        raise OptionError(
            "--position-embedding-type yarn: found a Megatron-LM that does not hand YaRN's values "
            "to the model, expected 0.19 or newer: update it, or use the standalone trainer"
        )
    factor = getattr(args, "rope_scaling_factor", 8.0)
    if getattr(args, "use_rope_scaling", False) and factor != 8.0:
        raise OptionError(
            f"--rope-scaling-factor: found {factor}, expected 8, which Megatron-LM's script "
            "always uses: leave the flag out, or use the standalone trainer"
        )


def _check_growth(args: argparse.Namespace) -> None:
    """Refuses a growing batch where Megatron-LM reads the flag and does not grow it."""
    if getattr(args, "rampup_batch_size", None) and hasattr(args, "step_batch_size_schedule"):
        raise OptionError(
            f"--rampup-batch-size: found {args.rampup_batch_size}, expected none: Megatron-LM "
            "ignores it from 0.18 on: give --step-batch-size-schedule"
        )


def _check_attention(backend: Any) -> None:
    """Refuses kernels of plain matrix products; the choice is Megatron's `AttnBackend`."""
    found = getattr(backend, "name", backend)
    if found in ("unfused", "local"):
        raise OptionError(
            f"--attention-backend {found} does not go with --hybrid-data-parallel, which needs "
            "auto, fused or flash: TransformerEngine's unfused kernels do not support rings. "
            "--hdp-attention chooses HDP's kernel; its torch needs no TransformerEngine"
        )


def _check_latent_attention(args: argparse.Namespace) -> None:
    """Refuses what Megatron cannot build, or recomputes in its own pass through the layer."""
    if args.transformer_impl != "transformer_engine":
        raise OptionError(
            f"--multi-latent-attention with --transformer-impl {args.transformer_impl}: expected "
            f"transformer_engine, because the local attention of Megatron {installed_version()} "
            "does not support heads of two sizes: install TransformerEngine, or use the "
            "standalone trainer, which does not need it"
        )
    if "mla_up_proj" in (getattr(args, "recompute_modules", None) or ()):
        raise OptionError(
            "--recompute-modules mla_up_proj does not go with --hybrid-data-parallel, whose rings "
            "send the latent of multi-latent attention: leave it out, or recompute whole layers"
        )


def _check_grouped_gemm(transformer_impl: str) -> None:
    """Refuses it where Megatron would use no grouped kernel, or one that HDP does not support.

    Without TransformerEngine's, Megatron 0.16 needs another package to build the model; later
    releases run experts one by one without a message.
    """
    from megatron.core.extensions.transformer_engine import TEColumnParallelGroupedLinear

    found = None
    if transformer_impl != "transformer_engine":
        found = f"--transformer-impl {transformer_impl}"
    elif TEColumnParallelGroupedLinear is None:
        found = "no TransformerEngine that has it"
    if found is not None:
        raise OptionError(
            f"--moe-grouped-gemm: found {found}, expected TransformerEngine's grouped kernel: pip "
            "install --no-build-isolation 'megatron-hdp[gpu]' and --transformer-impl "
            "transformer_engine, or leave the flag out, so that experts run one by one with the "
            "same result"
        )


def _check_interleaved_schedule(args: argparse.Namespace) -> None:
    """Refuses settings of virtual stages with which pipelines would wait for each other."""
    stages, group = args.pipeline_model_parallel_size, args.microbatch_group_size_per_vp_stage
    if group not in (None, stages):
        raise OptionError(
            f"--microbatch-group-size-per-virtual-pipeline-stage: found {group}, expected "
            f"{stages}, the pipeline stages: with other groups, pipelines that share rings may "
            "wait for each other for ever: leave it out"
        )
    if not args.overlap_p2p_comm:
        raise OptionError(
            "--no-overlap-p2p-communication with virtual stages: found it, expected none, because "
            "HDP's own exchange between stages is overlapped: leave it out"
        )
    if args.overlap_p2p_comm_warmup_flush:
        raise OptionError(
            "--overlap-p2p-communication-warmup-flush: found it, expected none, because HDP's own "
            "exchange between stages follows the schedule without it: leave it out"
        )


def check_derived(args: argparse.Namespace) -> None:
    """Checks what Megatron has derived in a run under HDP, by the standalone trainer's rules."""
    arguments = training_arguments(args)
    check_preferences(arguments)
    growth_of(arguments)
    check_layout(arguments)
    check_windows(arguments)
    if arguments.mtp_num_layers is not None:
        check_mtp(arguments)
    if num_model_chunks(arguments) > 1:
        _check_interleaved_schedule(args)
    if getattr(args, "apply_rope_fusion", False) and not fused_kernel_can_count(arguments):
        raise OptionError(
            f"found --hdp-tokens-per-rank {arguments.hdp_tokens_per_rank}, with which a rank's "
            "micro-batch may have 2^31 values of queries, keys and values; expected fewer, because "
            "TransformerEngine's rotary kernel counts in 32 bits: add --no-rope-fusion"
        )
    if args.num_experts is None:
        return
    check_values(
        MoeOptions(**{one.name: getattr(arguments, one.name) for one in fields(MoeOptions)})
    )
    check_moe(arguments)


def settle(args: argparse.Namespace) -> None:
    """Sets Megatron's own flags as HDP needs them; of the user's choices only fusions.

    ``args.hdp_validation_sets`` becomes the names that validation sets were given, None without
    ``--multiple-validation-sets``.
    """
    args.calculate_per_token_loss = True
    fuses = getattr(args, "apply_rope_fusion", False) and fused_kernel_is_there()
    args.apply_rope_fusion = fuses and not getattr(args, "multi_latent_attention", False)
    args.hdp_validation_sets = None
    if getattr(args, "multiple_validation_sets", False):
        args.hdp_validation_sets = list(getattr(args, "validation_set_names", None) or [])
        args.validation_set_names = None
    args.multiple_validation_sets = False  # one evaluation, whose losses are logged by source


def training_arguments(args: argparse.Namespace) -> TrainingArguments:
    """The arguments of HDP's classes, from Megatron's once they are validated."""
    values: dict[str, Any] = {}
    groups = HdpOptions, MediaOptions, PreferenceOptions
    ours = {item.name for group in groups for item in fields(group)}
    for item in fields(TrainingArguments):
        is_megatrons_path = "Path" in str(item.type) and item.name not in ours
        if item.name in LEFT_OUT or is_megatrons_path or not hasattr(args, item.name):
            continue
        value = getattr(args, item.name)
        values[item.name] = tuple(value) if isinstance(value, list) else value
    if values.get("rampup_batch_size"):
        values["rampup_batch_size"] = tuple(map(int, values["rampup_batch_size"]))
    values["moe_layer_freq"] = str(getattr(args, "moe_layer_freq", 1))
    for name in ("window_size", "window_attn_skip_freq"):
        found = getattr(args, name, None)
        values[name] = None if found is None else str(found)
    if getattr(args, "sft", False):  # releases mask some formats differently
        values["sft_tokenizer_prompt_format"] += f"@{release_of(installed_version())}"
    if not args.group_query_attention:
        values["num_query_groups"] = args.num_attention_heads
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if pattern is None:
        return TrainingArguments(**values)
    values["num_virtual_stages_per_pipeline_rank"] = None  # derived from the pattern's bars
    return HybridArguments(**values | options_of_pattern(pattern))


def with_paths(arguments: TrainingArguments, args: argparse.Namespace) -> TrainingArguments:
    """With Megatron's folders of checkpoints, which HDP reads and writes of itself nowhere else."""
    paths = (getattr(args, name, None) for name in ("save", "pretrained_checkpoint"))
    save, pretrained = (Path(one) if one else None for one in paths)
    return replace(arguments, save=save, pretrained_checkpoint=pretrained)
