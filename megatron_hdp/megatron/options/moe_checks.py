"""Checks the options of mixture of experts, with each other and with HDP: `OptionError`."""

from dataclasses import fields
from typing import Any

from megatron_hdp.megatron.options.arguments import TrainingArguments, expert_domain_size
from megatron_hdp.megatron.options.layer_patterns import expert_layers
from megatron_hdp.megatron.options.model_options import MoeOptions
from megatron_hdp.options import HdpOptions, OptionError, flag_of, no_effect, require_multiple


def check_moe(args: TrainingArguments) -> None:
    """Checks these options together, derived defaults filled in."""
    if args.num_experts is None:
        derived = {"expert_tensor_parallel_size": args.tensor_model_parallel_size}
        for item in fields(MoeOptions):
            if getattr(args, item.name) != derived.get(item.name, item.default):
                raise no_effect(flag_of(item.name), "--num-experts")
        return
    _check_router(args)
    _check_choice(args)
    _check_layers(args)
    _check_ranks(args)
    if args.hybrid_data_parallel:
        _check_with_hdp(args)


def _check_router(args: TrainingArguments) -> None:
    topk, experts = args.moe_router_topk, args.num_experts or 0
    if topk > experts:
        raise OptionError(
            f"--moe-router-topk {topk} is more than --num-experts {experts}: lower it"
        )
    sigmoid = args.moe_router_score_function == "sigmoid"
    if topk == 1 and not args.moe_router_pre_softmax and not sigmoid:
        raise OptionError(
            "--moe-router-topk 1 needs --moe-router-pre-softmax: a softmax over one chosen expert "
            "is always 1 and gives the router no gradient"
        )
    if sigmoid and args.moe_router_pre_softmax:
        raise OptionError(
            "--moe-router-pre-softmax has no effect with --moe-router-score-function sigmoid: "
            "leave one of them out"
        )
    if args.moe_router_enable_expert_bias and not sigmoid:
        raise OptionError(
            "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid: Megatron "
            "adds the bias to sigmoid scores only"
        )
    if args.moe_router_load_balancing_type == "none" and args.moe_aux_loss_coeff:
        raise OptionError(
            f"--moe-aux-loss-coeff {args.moe_aux_loss_coeff} has no effect with "
            "--moe-router-load-balancing-type none: choose another type or remove it"
        )


def _check_choice(args: TrainingArguments) -> None:
    """Checks the groups of experts from which a token's experts are selected."""
    groups, chosen = args.moe_router_num_groups, args.moe_router_group_topk
    experts, topk = args.num_experts or 0, args.moe_router_topk
    if (groups is None) != (chosen is None):
        raise OptionError(
            "--moe-router-num-groups and --moe-router-group-topk go together: give both or neither"
        )
    if groups is None or chosen is None:
        return
    if experts % groups or chosen > groups:
        raise OptionError(
            f"found --moe-router-num-groups {groups} and --moe-router-group-topk {chosen}, "
            f"expected a number of groups that divides --num-experts {experts}, and at most "
            "that many selected groups: change one of them"
        )
    if topk % chosen or topk // chosen > experts // groups:
        raise OptionError(
            f"--moe-router-topk {topk}: expected a multiple of --moe-router-group-topk {chosen}, "
            f"and at most {chosen} x {experts // groups}, the experts of the selected groups, "
            "as a group's score is the sum of its best experts: change one of them"
        )


def _check_layers(args: TrainingArguments) -> None:
    """Checks which layers hold experts, and the shared experts and biases in them."""
    if not any(expert_layers(args)):
        raise OptionError(
            f"--moe-layer-freq {args.moe_layer_freq}: found no layer with experts, expected at "
            "least one: leave --num-experts out"
        )
    shared = args.moe_shared_expert_intermediate_size
    for name in ("moe_shared_expert_gate", "moe_shared_expert_overlap"):
        if shared is None and getattr(args, name):
            raise no_effect(flag_of(name), "--moe-shared-expert-intermediate-size")
    if args.moe_shared_expert_overlap and args.moe_token_dispatcher_type == "allgather":
        raise OptionError(
            "--moe-shared-expert-overlap: found --moe-token-dispatcher-type allgather, expected "
            "alltoall, beside whose exchange shared experts run: give it, or leave the flag out"
        )
    require_multiple(args, "moe_shared_expert_intermediate_size", "tensor_model_parallel_size")
    if not args.add_bias_linear:
        return
    if shared is not None:
        raise OptionError(
            "--moe-shared-expert-intermediate-size needs --disable-bias-linear: Megatron's shared "
            "experts have no bias"
        )
    if args.expert_tensor_parallel_size > 1:
        raise OptionError(
            f"--expert-tensor-parallel-size {args.expert_tensor_parallel_size} needs "
            "--disable-bias-linear: each of these ranks would add an expert's bias to the sum over "
            "them; or give --expert-tensor-parallel-size 1"
        )


def _check_ranks(args: TrainingArguments) -> None:
    tensor_ranks = args.tensor_model_parallel_size
    expert_ranks = args.expert_model_parallel_size
    expert_tensor_ranks = args.expert_tensor_parallel_size
    if tensor_ranks > 1 and not args.sequence_parallel:
        raise OptionError(
            f"--num-experts with --tensor-model-parallel-size {tensor_ranks} needs "
            "--sequence-parallel: Megatron's experts need different tokens on each tensor-parallel "
            "rank"
        )
    require_multiple(args, "num_experts", "expert_model_parallel_size")
    require_multiple(args, "moe_ffn_hidden_size", "expert_tensor_parallel_size")
    if expert_ranks == 1 and expert_tensor_ranks != tensor_ranks:
        raise OptionError(
            f"--expert-tensor-parallel-size {expert_tensor_ranks} differs from "
            f"--tensor-model-parallel-size {tensor_ranks}, and with --expert-model-parallel-size 1 "
            "Megatron reduces experts' gradients as if they were equal: make them equal or raise "
            "--expert-model-parallel-size"
        )
    ranks = expert_ranks * expert_tensor_ranks
    if args.moe_token_dispatcher_type == "flex" and (ranks == 1 or not args.bf16):
        found = "a single rank for all experts" if ranks == 1 else "no --bf16"
        raise OptionError(
            f"--moe-token-dispatcher-type flex: found {found}, expected experts over several ranks "
            "and BF16, which DeepEP sends: use alltoall"
        )
    if ranks % tensor_ranks and tensor_ranks % ranks:
        raise OptionError(
            f"--expert-model-parallel-size {expert_ranks} x --expert-tensor-parallel-size "
            f"{expert_tensor_ranks} = {ranks} ranks neither divide nor are a multiple of "
            f"--tensor-model-parallel-size {tensor_ranks}: change one of them"
        )


def check_dispatcher(of: Any, options: HdpOptions) -> None:
    """Checks with HDP's options how tokens reach experts that span HDP ranks.

    Args:
        of: arguments, ours or Megatron's, or a model's configuration.
        options: HDP's.
    """
    if getattr(of, "moe_shared_expert_overlap", False) and options.hdp_offload != "off":
        raise OptionError(
            f"--moe-shared-expert-overlap with --hdp-offload {options.hdp_offload}: expected off, "
            "because what shared experts save lies on a stream that offload does not follow: leave "
            "one of them out"
        )
    backend = getattr(of, "moe_flex_dispatcher_backend", "deepep")
    if getattr(of, "moe_token_dispatcher_type", None) != "flex":
        return
    if options.hdp_survive:
        raise OptionError(
            "--moe-token-dispatcher-type flex with --hdp-survive: expected alltoall, because "
            "DeepEP's buffers have connections of their own, to the ranks that were there: leave "
            "one of them out"
        )
    if backend == "deepep":
        return
    if backend != "hybridep":
        raise OptionError(
            f"--moe-flex-dispatcher-backend {backend} does not go with --hybrid-data-parallel, "
            "which needs deepep: its buffers have room for --seq-length tokens of every rank"
        )
    if not getattr(of, "moe_hybridep_pad_uneven_dispatch_inputs", False):
        raise OptionError(
            "--moe-flex-dispatcher-backend hybridep needs equally many tokens on every rank, but "
            "HDP ranks hold different numbers: use deepep, or from Megatron-LM 0.19 on add "
            "--moe-hybridep-pad-uneven-dispatch-inputs"
        )


def _check_with_hdp(args: TrainingArguments) -> None:
    check_dispatcher(args, args)
    kind = args.moe_router_load_balancing_type
    if kind in ("aux_loss", "global_aux_loss") and args.moe_aux_loss_coeff:
        level = "each rank's micro-batch" if kind == "aux_loss" else "the micro-batches so far"
        raise OptionError(
            f"--moe-router-load-balancing-type {kind} balances {level}, which the plan chooses, "
            "so gradients would depend on ranks and strategy: use seq_aux_loss, or "
            "--moe-aux-loss-coeff 0"
        )
    if args.moe_token_dispatcher_type == "allgather" and expert_domain_size(args) > 1:
        raise OptionError(
            "--moe-token-dispatcher-type allgather needs equally many tokens on every rank, "
            f"but --expert-model-parallel-size {args.expert_model_parallel_size} spans "
            f"{expert_domain_size(args)} HDP ranks, which hold different numbers: use alltoall or "
            "flex"
        )
