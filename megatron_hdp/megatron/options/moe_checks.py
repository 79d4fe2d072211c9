"""Which options of mixture of experts go together, with each other and with HDP."""

from dataclasses import fields

from megatron_hdp.megatron.options.arguments import TrainingArguments, expert_domain_size
from megatron_hdp.megatron.options.model_options import MoeOptions
from megatron_hdp.options import OptionError, flag_of


def check_moe(args: TrainingArguments) -> None:
    """Checks these options together, derived defaults filled in.

    Raises:
        OptionError: says what was found, what was expected and the remedy.
    """
    if args.num_experts is None:
        _check_unused(args)
        return
    _check_router(args)
    _check_ranks(args)
    if args.hybrid_data_parallel:
        _check_with_hdp(args)


def _check_unused(args: TrainingArguments) -> None:
    derived = {"expert_tensor_parallel_size": args.tensor_model_parallel_size}
    for item in fields(MoeOptions):
        if getattr(args, item.name) != derived.get(item.name, item.default):
            raise OptionError(
                f"{flag_of(item.name)} has no effect without --num-experts: add the one or remove "
                "the other"
            )


def _check_router(args: TrainingArguments) -> None:
    topk, experts = args.moe_router_topk, args.num_experts or 0
    if topk > experts:
        raise OptionError(
            f"--moe-router-topk {topk} is more than --num-experts {experts}: lower it"
        )
    if topk == 1 and not args.moe_router_pre_softmax:
        raise OptionError(
            "--moe-router-topk 1 needs --moe-router-pre-softmax: a softmax over one chosen expert "
            "is always 1 and gives the router no gradient"
        )
    if args.add_bias_linear:
        raise OptionError(
            "--num-experts needs --disable-bias-linear: adding a bias to an expert's output fails "
            "in Megatron's own layers"
        )
    if args.moe_router_load_balancing_type == "none" and args.moe_aux_loss_coeff:
        raise OptionError(
            f"--moe-aux-loss-coeff {args.moe_aux_loss_coeff} has no effect with "
            "--moe-router-load-balancing-type none: choose another type or remove it"
        )


def _check_ranks(args: TrainingArguments) -> None:
    tensor_ranks = args.tensor_model_parallel_size
    expert_ranks = args.expert_model_parallel_size
    expert_tensor_ranks = args.expert_tensor_parallel_size
    if tensor_ranks > 1 and not args.sequence_parallel:
        raise OptionError(
            f"--num-experts with --tensor-model-parallel-size {tensor_ranks} needs "
            "--sequence-parallel: Megatron's experts want each tensor-parallel rank to hold its "
            "own tokens"
        )
    if (args.num_experts or 0) % expert_ranks:
        raise OptionError(
            f"--num-experts {args.num_experts} is not a multiple of --expert-model-parallel-size "
            f"{expert_ranks}: change one of them"
        )
    if (args.moe_ffn_hidden_size or 0) % expert_tensor_ranks:
        raise OptionError(
            f"--moe-ffn-hidden-size {args.moe_ffn_hidden_size} is not a multiple of "
            f"--expert-tensor-parallel-size {expert_tensor_ranks}: change one of them"
        )
    if expert_ranks == 1 and expert_tensor_ranks != tensor_ranks:
        raise OptionError(
            f"--expert-tensor-parallel-size {expert_tensor_ranks} differs from "
            f"--tensor-model-parallel-size {tensor_ranks}, and with --expert-model-parallel-size 1 "
            "Megatron reduces experts' gradients as if they were equal: make them equal or raise "
            "--expert-model-parallel-size"
        )
    ranks = expert_ranks * expert_tensor_ranks
    if ranks % tensor_ranks and tensor_ranks % ranks:
        raise OptionError(
            f"--expert-model-parallel-size {expert_ranks} x --expert-tensor-parallel-size "
            f"{expert_tensor_ranks} = {ranks} ranks neither divide nor are a multiple of "
            f"--tensor-model-parallel-size {tensor_ranks}: change one of them"
        )


def _check_with_hdp(args: TrainingArguments) -> None:
    kind = args.moe_router_load_balancing_type
    if kind in ("aux_loss", "global_aux_loss") and args.moe_aux_loss_coeff:
        level = "each rank's micro-batch" if kind == "aux_loss" else "the micro-batches so far"
        raise OptionError(
            f"--moe-router-load-balancing-type {kind} levels {level}, which the plan chooses, so "
            "gradients would depend on ranks and strategy: use seq_aux_loss, or "
            "--moe-aux-loss-coeff 0"
        )
    if args.moe_token_dispatcher_type == "allgather" and expert_domain_size(args) > 1:
        raise OptionError(
            "--moe-token-dispatcher-type allgather gathers equally many tokens from every rank, "
            f"and --expert-model-parallel-size {args.expert_model_parallel_size} spans "
            f"{expert_domain_size(args)} HDP ranks, which hold different numbers: use alltoall"
        )
