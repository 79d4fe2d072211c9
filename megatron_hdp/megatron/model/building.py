"""Builds megatron-core's GPTModel, stock or with HDP attention and rotary positions."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import layers, random
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_hdp.megatron.model.attention import HdpCoreAttention
from megatron_hdp.megatron.model.frozen import choose_trained, require_trained
from megatron_hdp.megatron.model.fused_loss import FusedLossModel
from megatron_hdp.megatron.model.initialisation import initialise_by_name
from megatron_hdp.megatron.model.mla import attend_to_own_positions, mla_settings
from megatron_hdp.megatron.model.moe import (
    activation_settings,
    balance_by_sequence,
    let_biases_be_added,
    moe_settings,
)
from megatron_hdp.megatron.model.mtp import further_layers, mtp_settings, mtp_spec
from megatron_hdp.megatron.model.rotary import (
    fused_kernel_can_count,
    fused_kernel_is_there,
    give_own_positions,
    position_settings,
    yarn_attributes,
)
from megatron_hdp.megatron.options import (
    TrainingArguments,
    expert_layers,
    expert_layers_of_chunk,
    num_model_chunks,
    padded_vocab_size,
    window_settings,
)
from megatron_hdp.megatron.parallel import compute_device, say
from megatron_hdp.options import OptionError

_OF_ARGUMENTS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("kv_channels", "normalization", "add_bias_linear", "add_qkv_bias", "qk_layernorm"),
    *("init_method_std", "attention_dropout", "softmax_type", "hidden_dropout"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "sequence_parallel"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    "pipeline_model_parallel_layout",
)
_EMPTIED = ("layernorm", "moe_act", "mla_up_proj")
"""Modules whose recomputation empties their outputs."""
_SOFTMAX_KERNELS = "scaled_upper_triang_masked_softmax_cuda"


class SequenceParallelNorm:
    """Builds PyTorch's norm, where megatron-core itself wants apex's or TransformerEngine's.

    Its weights are marked: each tensor-parallel rank sees its share of the tokens, so Megatron must
    sum their gradients over the tensor-parallel ranks.
    """

    def __new__(cls, config: TransformerConfig, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """A `torch.nn` norm with marked weights."""
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = WrappedTorchNorm(plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def _is_found(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def model_dtype(arguments: TrainingArguments) -> torch.dtype:
    """The parameters' dtype."""
    if arguments.fp64:
        return torch.float64
    return torch.bfloat16 if arguments.bf16 else torch.float32


def check_recomputation(args: Any) -> None:
    """Refuses modules that Megatron cannot recompute by themselves here, or never ends to.

    Args:
        args: our arguments, or Megatron's.

    Raises:
        OptionError: there are some.
    """
    modules = getattr(args, "recompute_modules", None) or ()
    if args.recompute_granularity != "selective":
        return
    emptied = [one for one in modules if one in _EMPTIED]
    if emptied and not hasattr(random, "FP8GlobalStateManager"):
        raise OptionError(
            f"--recompute-modules {' '.join(emptied)}: found no TransformerEngine, expected it, "
            "because Megatron asks it whether FP8 is on: pip install --no-build-isolation "
            "'megatron-hdp[gpu]', or leave them out"
        )
    if "mlp" in modules and args.add_bias_linear:
        raise OptionError(
            "--recompute-modules mlp: found biases, expected none, because Megatron's "
            "recomputation of an MLP with them never ends: add --disable-bias-linear, or leave mlp "
            "out"
        )


def transformer_config(arguments: TrainingArguments) -> TransformerConfig:
    """Megatron's model configuration; fused kernels only where there is a GPU.

    Those of the softmax, imported when first used, and of weights' gradients, added up in float32,
    are compiled with NVIDIA's apex; the one of rotary positions is TransformerEngine's. All others
    come from torch.compile.
    """
    check_recomputation(arguments)
    on_gpu = compute_device().type == "cuda"
    dtype = model_dtype(arguments)
    chunks = num_model_chunks(arguments)
    latent = arguments.multi_latent_attention
    config = (MLATransformerConfig if latent else TransformerConfig)(
        **{name: getattr(arguments, name) for name in _OF_ARGUMENTS},
        recompute_modules=arguments.recompute_modules and list(arguments.recompute_modules),
        layernorm_epsilon=arguments.norm_epsilon,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        num_layers_in_first_pipeline_stage=arguments.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=arguments.decoder_last_pipeline_num_layers,
        overlap_p2p_comm=chunks > 1,
        batch_p2p_comm=chunks == 1,
        deallocate_pipeline_outputs=True,
        **activation_settings(arguments),
        **moe_settings(arguments),
        **position_settings(arguments),
        **mtp_settings(arguments),
        **window_settings(arguments),
        **mla_settings(arguments),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        attention_softmax_in_fp32=True,
        calculate_per_token_loss=arguments.hybrid_data_parallel,
        use_cpu_initialization=not on_gpu,
        gradient_accumulation_fusion=on_gpu and layers._grad_accum_fusion_available,
        masked_softmax_fusion=on_gpu and _is_found(_SOFTMAX_KERNELS),
        bias_activation_fusion=on_gpu and _fuses_activation(arguments),
        bias_dropout_fusion=on_gpu,
        apply_rope_fusion=_fuses_rotation(arguments),
    )
    for name, value in yarn_attributes(arguments).items():
        setattr(config, name, value)
    return config


def _fuses_activation(arguments: TrainingArguments) -> bool:
    """Whether Megatron's fused kernel takes the gated unit: of SwiGLU without a clamp, else of
    routed experts alone.
    """
    if arguments.swiglu:
        return arguments.activation_func_clamp_value is None and not arguments.glu_linear_offset
    only_routed = arguments.moe_shared_expert_intermediate_size is None
    return arguments.quick_geglu and all(expert_layers(arguments)) and only_routed


def _fuses_rotation(arguments: TrainingArguments) -> bool:
    """Whether queries and keys are turned by TransformerEngine's kernel, which knows no float64."""
    if arguments.position_embedding_type != "rope" or arguments.fp64 or not fused_kernel_is_there():
        return False
    if arguments.multi_latent_attention:
        return False
    if not fused_kernel_can_count(arguments):
        say(
            "rotary positions are not fused: a micro-batch may have 2^31 values of queries, keys "
            "and values on a rank, which TransformerEngine's kernel cannot count"
        )
        return False
    return True


def layer_spec(arguments: TrainingArguments, has_experts: bool) -> ModuleSpec:
    """Megatron's local layer specification, its core attention replaced when HDP is on."""
    spec = get_gpt_layer_local_spec(
        num_experts=arguments.num_experts if has_experts else None,
        qk_layernorm=arguments.qk_layernorm,
        multi_latent_attention=arguments.multi_latent_attention,
        normalization=arguments.normalization,
    )
    attention = spec.submodules.self_attention.submodules
    if arguments.hybrid_data_parallel:
        attention.core_attention = HdpCoreAttention
        if arguments.multi_latent_attention:
            attend_to_own_positions(spec, has_experts=has_experts)
        if has_experts:
            balance_by_sequence(spec)
    if arguments.sequence_parallel and spec.submodules.input_layernorm is WrappedTorchNorm:
        spec.submodules.input_layernorm = SequenceParallelNorm
        spec.submodules.pre_mlp_layernorm = SequenceParallelNorm
        if arguments.qk_layernorm:
            key_norm = "kv_layernorm" if arguments.multi_latent_attention else "k_layernorm"
            attention.q_layernorm = SequenceParallelNorm
            setattr(attention, key_norm, SequenceParallelNorm)
    return spec


def block_spec(
    arguments: TrainingArguments, chunk: int = 0
) -> ModuleSpec | TransformerBlockSubmodules:
    """The layers of this rank's stage, or of one of its model chunks, and a last norm like theirs.

    Without HDP Megatron makes them in its own way, unless a norm differs or layers do. That gives
    the last norm another class where TransformerEngine is installed, whose extra state the
    checkpoints of other machines lack.
    """
    kinds = set(expert_layers(arguments))
    specs = {kind: layer_spec(arguments, kind) for kind in kinds}
    first = next(iter(specs.values()))
    norm = first.submodules.input_layernorm
    plain = norm is not SequenceParallelNorm and not arguments.hybrid_data_parallel
    if plain and len(kinds) == 1:
        return first
    stage = parallel_state.get_pipeline_model_parallel_rank()
    layers = expert_layers_of_chunk(arguments, stage, chunk)
    return TransformerBlockSubmodules(layer_specs=[specs[one] for one in layers], layer_norm=norm)


def build_chunks(
    arguments: TrainingArguments, vocab_size: int, encoder: torch.nn.Module | None = None
) -> list[DistributedDataParallel]:
    """This rank's parts of the model, each wrapped in Megatron's DDP, on its device.

    Several with virtual stages, else one. `vocab_size` is that of the tokenizer, padded here. The
    first of them has the encoder, whatever stage it is of. With frozen weights or adapters every
    rank must call this.
    """
    config = transformer_config(arguments)
    num_chunks = num_model_chunks(arguments)
    chunks = [
        _chunk(arguments, config, vocab_size, one, num_chunks, None if one else encoder)
        for one in range(num_chunks)
    ]
    if arguments.hybrid_data_parallel:
        require_trained(chunks, arguments)
    return chunks


def build_gpt(arguments: TrainingArguments, vocab_size: int) -> DistributedDataParallel:
    """This rank's part of a model without virtual stages; arguments as of `build_chunks`."""
    (model,) = build_chunks(arguments, vocab_size)
    return model


def _chunk(
    arguments: TrainingArguments,
    config: TransformerConfig,
    vocab_size: int,
    chunk: int,
    num_chunks: int,
    encoder: torch.nn.Module | None = None,
) -> DistributedDataParallel:
    fused = arguments.hybrid_data_parallel and arguments.hdp_fused_loss
    has_experts = expert_layers(arguments)
    model = (FusedLossModel if fused else GPTModel)(
        config=config,
        transformer_layer_spec=block_spec(arguments, chunk),
        mtp_block_spec=mtp_spec(arguments, config, layer_spec(arguments, has_experts[-1])),
        vocab_size=padded_vocab_size(vocab_size, arguments),
        max_sequence_length=arguments.max_position_embeddings,
        pre_process=chunk == 0 and parallel_state.is_pipeline_first_stage(),
        post_process=chunk == num_chunks - 1 and parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=not arguments.untie_embeddings_and_output_weights,
        position_embedding_type=arguments.position_embedding_type,
        rotary_percent=arguments.rotary_percent,
        rotary_base=arguments.rotary_base,
        rope_scaling=arguments.use_rope_scaling,
        rope_scaling_factor=arguments.rope_scaling_factor,
        seq_len_interpolation_factor=arguments.rotary_seq_len_interpolation_factor,
        vp_stage=chunk if num_chunks > 1 else None,
    )
    for layer in (*model.decoder.layers, *further_layers(model)):
        let_biases_be_added(layer)
    if arguments.hybrid_data_parallel:
        give_own_positions(model)
        initialise_by_name(model, arguments.seed)
        choose_trained(model, arguments, encoder)
    model.to(compute_device(), model_dtype(arguments))  # torch's norms ignore params_dtype
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.bf16,
        overlap_grad_reduce=arguments.overlap_grad_reduce,
        overlap_param_gather=arguments.overlap_param_gather,
        use_distributed_optimizer=arguments.use_distributed_optimizer,
        bucket_size=arguments.ddp_bucket_size,
    )
    wrapped = Float16Module(config, model) if config.bf16 else model
    return DistributedDataParallel(config, ddp_config, wrapped, disable_bucketing=chunk > 0)
