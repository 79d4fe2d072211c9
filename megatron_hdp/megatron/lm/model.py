"""Adapts the model that Megatron-LM has built to HDP.

Classes change, parameters do not: weights, their names and what checkpoints hold stay Megatron's,
and so do the names of classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_hdp.megatron.model import (
    PASSES,
    EndsInLoss,
    FusedLossHybrid,
    FusedLossModel,
    HdpCoreAttention,
    HdpMlaSelfAttention,
    HdpMoeTransformerLayer,
    HdpMtpLayer,
    attends,
    derived,
    further_layers,
    give_megatrons_passes,
    give_own_positions,
    hybrid_class,
    let_biases_be_added,
    require_known_blocks,
    require_own,
    require_whole_layers,
)

# names, because TransformerEngine may not be installed
_CORE_ATTENTIONS = ("DotProductAttention", "TEDotProductAttention")


def adapt(model: Any, *, fused_loss: bool) -> Any:
    """Puts HDP's attention, positions, routers and loss into one stage of a model, in place.

    Args:
        model: what Megatron's model provider returned, a GPT or a hybrid.
        fused_loss: whether the loss is taken without making logits.

    Raises:
        ValueError: HDP does not support this model.
    """
    hybrid = hybrid_class()
    is_hybrid = isinstance(model, hybrid)
    if not is_hybrid and not isinstance(model, GPTModel):
        raise ValueError(
            f"the script's model provider: found a {type(model).__name__}, expected "
            "megatron.core's GPTModel, HybridModel or a subclass: use pretrain_gpt.py or "
            "pretrain_hybrid.py"
        )
    if is_hybrid:
        for stack in (one for one in model.modules() if hasattr(one, "layer_type_list")):
            require_known_blocks(stack)
    else:
        give_megatrons_passes(model)
        require_own(model, GPTModel, PASSES[:2])
    names = {path: type(module).__name__ for path, module in model.named_modules()}
    for layer in (*model.decoder.layers, *further_layers(model)):
        if attends(layer):
            _adapt_attention(layer.self_attention, layer.layer_number)
        if isinstance(layer.mlp, MoELayer):
            HdpMoeTransformerLayer.adopt(layer)
            let_biases_be_added(layer)
    give_own_positions(model)
    HdpMtpLayer.adopt_all(model)
    if fused_loss and is_hybrid:
        FusedLossHybrid.adopt(model, hybrid)
    elif fused_loss:
        FusedLossModel.adopt(model)
    for path, module in model.named_modules():
        if names.get(path, type(module).__name__) != type(module).__name__:
            module.__class__ = derived(names[path], (type(module),))
    return model


def take_over(chunks: Sequence[Any]) -> Any:
    """Adapts a model's chunks on a rank in place, each in Megatron's DDP; returns the first one.

    Some may be adapted already; the wrappers stay.

    Raises:
        ValueError: HDP does not support the model or its DDP.
    """
    models = [get_attr_wrapped_model(one, "decoder", return_model_obj=True) for one in chunks]
    for chunk, model in zip(chunks, models, strict=True):
        require_whole_layers(model)
        if not isinstance(model, EndsInLoss):
            adapt(model, fused_loss=True)
        if getattr(chunk.ddp_config, "overlap_param_gather", False):
            raise ValueError(
                "found overlap_param_gather in the model's DistributedDataParallelConfig, expected "
                "none, because parameters must be whole before the first micro-batch: turn it off"
            )
        config = get_model_config(chunk)
        config.no_sync_func = config.grad_sync_func = config.param_sync_func = None
        if len(chunks) > 1:  # as virtual stages exchange in HDP's schedule
            config.overlap_p2p_comm, config.batch_p2p_comm = True, False
            config.overlap_p2p_comm_warmup_flush = False
    return models[0]


def _adapt_attention(attention: Any, layer_number: int) -> None:
    core = type(getattr(attention, "core_attention", None)).__name__
    if not isinstance(attention, SelfAttention | MLASelfAttention) or core not in _CORE_ATTENTIONS:
        raise ValueError(
            f"layer {layer_number}: found {type(attention).__name__} with {core}, expected "
            f"SelfAttention or MLASelfAttention with {' or '.join(_CORE_ATTENTIONS)}: use "
            "Megatron's own layer specification"
        )
    if isinstance(attention, SelfAttention):
        require_own(attention, SelfAttention, ("forward", "_checkpointed_attention_forward"))
    core_attention = HdpCoreAttention(
        attention.config,
        layer_number,
        attention.attn_mask_type,
        attention.attention_type,
        softmax_scale=_softmax_scale(attention),
    )
    core_attention.take_over(attention.core_attention)
    attention.core_attention = core_attention
    if isinstance(attention, MLASelfAttention):
        HdpMlaSelfAttention.adopt(attention)


def _softmax_scale(attention: SelfAttention | MLASelfAttention) -> float | None:
    """What Megatron gives its core attention: the configuration's, of latents YaRN's."""
    found: float | None = (
        attention.softmax_scale
        if isinstance(attention, MLASelfAttention)
        else attention.config.softmax_scale
    )
    return found
