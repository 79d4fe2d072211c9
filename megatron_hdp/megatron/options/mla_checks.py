"""Checks the options of multi-latent attention, with each other and with HDP: `OptionError`."""

from dataclasses import fields

from megatron_hdp.megatron.options.arguments import TrainingArguments
from megatron_hdp.megatron.options.model_options import MlaOptions
from megatron_hdp.options import OptionError, flag_of, no_effect, require_multiple


def check_mla(args: TrainingArguments) -> None:
    """Checks these options together, derived defaults filled in."""
    check_latent_ring(args.multi_latent_attention, args.hdp_mla_ring)
    if not args.multi_latent_attention:
        for item in fields(MlaOptions):
            if getattr(args, item.name) != item.default:
                raise no_effect(flag_of(item.name), "--multi-latent-attention")
        return
    if not args.hybrid_data_parallel:
        raise OptionError(
            "--multi-latent-attention goes with --hybrid-data-parallel in this command: Megatron's "
            "own local attention does not support heads of two sizes: add it, or train with "
            "Megatron-LM's script"
        )
    _check_attention(args)
    _check_tensor_ranks(args)


def check_latent_ring(is_latent: bool, hdp_mla_ring: str) -> None:
    """Checks that rings can send what ``--hdp-mla-ring`` names."""
    if hdp_mla_ring != "auto" and not is_latent:
        raise no_effect(f"--hdp-mla-ring {hdp_mla_ring}", "--multi-latent-attention")


def _check_attention(args: TrainingArguments) -> None:
    if args.group_query_attention:
        raise OptionError(
            "--multi-latent-attention does not support --group-query-attention or "
            "--num-query-groups, as one latent serves all heads: leave them out"
        )
    if args.add_qkv_bias:
        raise OptionError(
            "--add-qkv-bias has no effect with --multi-latent-attention, whose projections have "
            "none: leave it out"
        )
    if args.softmax_type != "vanilla":
        raise OptionError(
            f"--softmax-type {args.softmax_type} is not supported with "
            "--multi-latent-attention: leave it out"
        )


def _check_tensor_ranks(args: TrainingArguments) -> None:
    """Megatron shares out the rows of down-projections between tensor-parallel ranks."""
    ranks = args.tensor_model_parallel_size
    if ranks > 1 and args.qk_layernorm and args.q_lora_rank and not args.sequence_parallel:
        raise OptionError(
            "--multi-latent-attention with --qk-layernorm, --q-lora-rank and "
            f"--tensor-model-parallel-size {ranks} needs --sequence-parallel: without it Megatron "
            "adds up the gradient of the queries' norm once for every tensor-parallel rank"
        )
    latent = args.kv_lora_rank + args.qk_pos_emb_head_dim
    if latent % ranks:
        raise OptionError(
            f"--kv-lora-rank {args.kv_lora_rank} + --qk-pos-emb-head-dim "
            f"{args.qk_pos_emb_head_dim} = {latent} is not a multiple of "
            f"--tensor-model-parallel-size {ranks}: use fewer tensor-parallel ranks"
        )
    fewer = "use fewer tensor-parallel ranks"
    require_multiple(args, "q_lora_rank", "tensor_model_parallel_size", fewer)
