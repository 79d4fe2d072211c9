"""Megatron's HybridModel on a CPU: of its local classes, where it has TransformerEngine's.

megatron-core 0.18.2 or newer has it; ``NEEDS`` skips tests of another one.
"""

import importlib.util
from functools import partial
from unittest import mock

import pytest
import torch
from megatron.core import package_info, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import SequenceParallelNorm, building
from megatron_hdp.megatron.model.initialisation import initialise_by_name
from megatron_hdp.megatron.options import num_model_chunks
from tests.gradient_equivalence.taken_over import TEDotProductAttention
from tests.support import gradients, own_loop
from tests.support.gradients import VOCABULARY

HAS_HYBRIDS = importlib.util.find_spec("megatron.core.models.hybrid") is not None
HAS_LATENT = HAS_HYBRIDS and package_info.__version__.split(".")[:2] != ["0", "18"]
NEEDS = pytest.mark.skipif(
    not HAS_HYBRIDS,
    reason="this megatron-core has no HybridModel: put 0.18.2 or newer first on PYTHONPATH",
)


def local_stack(config):
    """The specification of a stack whose blocks are those of Megatron's GPT without it."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer

    norm = norm_of(config)

    def layer(module, **submodules):
        return ModuleSpec(module=module, submodules=TransformerLayerSubmodules(**submodules))

    def attending(attention):
        return layer(
            TransformerLayer,
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
        )

    def multiplying(module, mlp):
        return layer(module, pre_mlp_layernorm=norm, mlp=mlp, mlp_bda=get_bias_dropout_add)

    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    blocks = {
        "attention_layer": attending(self_attention()),
        "mla_layer": attending(latent_attention(norm)),
        "mlp_layer": multiplying(MLPLayer, ModuleSpec(module=MLP, submodules=linear)),
        "mtp_block_spec": behind(norm),
    }
    if config.num_moe_experts is not None:
        how = {"num_experts": config.num_moe_experts, "moe_grouped_gemm": False}
        experts = get_moe_module_spec(use_te=False, **how)
        blocks["moe_layer"] = multiplying(TransformerLayer, experts)
    if not HAS_LATENT:
        del blocks["mla_layer"]
    return ModuleSpec(module=HybridStack, submodules=HybridStackSubmodules(**blocks))


def norm_of(config):
    """Megatron's norm without TransformerEngine."""
    return SequenceParallelNorm if config.sequence_parallel else WrappedTorchNorm


def self_attention():
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
        ),
    )


def latent_attention(norm):
    """Megatron's local core attention takes no heads of two sizes."""
    return ModuleSpec(
        module=MLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=TEDotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            kv_layernorm=norm,
        ),
    )


def behind(norm):
    """What multi-token prediction has beside the blocks of its pattern."""
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )

    of_layer = MultiTokenPredictionLayerSubmodules(
        enorm=norm,
        hnorm=norm,
        eh_proj=ColumnParallelLinear,
        mtp_model_layer=None,
        layer_norm=norm,
    )
    layer = ModuleSpec(module=MultiTokenPredictionLayer, submodules=of_layer)
    submodules = MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
    return ModuleSpec(module=MultiTokenPredictionBlock, submodules=submodules)


def hybrid_chunk(arguments, number, *, pattern, stack=local_stack, **ddp):
    """A part of a hybrid as a framework builds it from Megatron's classes.

    Args:
        arguments: of the run.
        number: of the part on this rank.
        pattern: of the whole model.
        stack: makes its specification of Megatron's configuration.
        ddp: settings of Megatron's DDP in place of the run's.
    """
    model = hybrid(arguments, number, pattern, stack)
    found = {
        "use_distributed_optimizer": arguments.use_distributed_optimizer,
        "overlap_grad_reduce": arguments.overlap_grad_reduce,
        **ddp,
    }
    how = DistributedDataParallelConfig(**found)
    return DistributedDataParallel(model.config, how, model, disable_bucketing=number > 0)


def hybrid(arguments, number, pattern, stack=local_stack):
    """The model alone, in float64, its weights drawn by their names."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    num = num_model_chunks(arguments)
    config = building.transformer_config(arguments)
    latent = arguments.multi_latent_attention
    with mock.patch.object(hybrid_block, "TENorm", norm_of(config)):  # which has no other seam
        model = HybridModel(
            config=config,
            hybrid_stack_spec=stack(config),
            vocab_size=building.padded_vocab_size(VOCABULARY, arguments),
            max_sequence_length=arguments.max_position_embeddings,
            hybrid_layer_pattern=pattern,
            pre_process=number == 0 and parallel_state.is_pipeline_first_stage(),
            post_process=number == num - 1 and parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=not arguments.untie_embeddings_and_output_weights,
            position_embedding_type="none" if latent else "rope",
            vp_stage=number if num > 1 else None,
        )
    initialise_by_name(model, arguments.seed)
    return model.to(torch.float64)


def hybrid_errors(arguments, pattern, kinds, seeds=(None, 0), *faults):
    """Body of a rank: as `own_loop.errors_of`, of a hybrid and of the same on one rank."""

    def alone(arguments):
        parallel.set_seeds(arguments.seed)
        whole = pattern.replace("|", "")
        return hybrid(gradients.stock(arguments), 0, whole)

    build = partial(hybrid_chunk, pattern=pattern)
    with (
        mock.patch.object(own_loop, "stock_chunk", build),
        mock.patch.object(gradients, "stock_model", alone),
    ):
        return own_loop.errors_of(arguments, kinds, seeds, *faults, by_megatron=True)
