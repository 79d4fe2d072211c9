"""Multi-latent attention (DeepSeek-V2) under HDP: Megatron's parameters, a forward pass of our own.

Megatron's own pass turns packed tokens by their place in the pack, refuses rings of a micro-batch,
and gives the rotated part of the keys, which all heads share, the gradient of one tensor-parallel
rank's heads alone where its projection's output is gathered.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_hdp.megatron.model.attention import HdpPackedSeqParams
from megatron_hdp.megatron.model.lora import normed, with_adapter
from megatron_hdp.megatron.model.rotary import at_own_positions
from megatron_hdp.megatron.model.taking import take_over_class
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.runtime.attention import AttentionByLatent

_OF_CONFIG = (
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("rotary_base", "rotary_percent", "rotary_scaling_factor", "mscale", "mscale_all_dim"),
)
_REPLACED = ("forward", "get_query_key_value_tensors", "_qkv_down_projection")
_OF_YARN = ("original_max_position_embeddings", "beta_fast", "beta_slow")


def mla_settings(arguments: TrainingArguments) -> dict[str, Any]:
    """What ``MLATransformerConfig`` needs beside the rest; nothing for another attention."""
    if not arguments.multi_latent_attention:
        return {}
    settings = {name: getattr(arguments, name) for name in _OF_CONFIG}
    settings |= {name: getattr(arguments, f"yarn_{name}") for name in _OF_YARN}
    return settings | {"multi_latent_attention": True, "rope_type": arguments.rope_type or "yarn"}


def attend_to_own_positions(spec: ModuleSpec, *, has_experts: bool) -> None:
    """Makes a local layer specification with Megatron's latent attention one that is right here.

    Its checkpoints call norms as those of TransformerEngine's layers do, which hold them inside;
    before experts the norm stands alone.
    """
    spec.submodules.self_attention.module = HdpMlaSelfAttention
    names = {
        "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
        "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    }
    if not has_experts:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    spec.submodules.sharded_state_dict_keys_map = names


class HdpMlaSelfAttention(MLASelfAttention):
    """Megatron's multi-latent attention, its tokens turned by their own positions.

    Its core attention must be `HdpCoreAttention`.
    """

    rotary_pos_emb: RotaryEmbedding

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._take_over()

    @classmethod
    def adopt(cls, stock: MLASelfAttention) -> None:
        """Makes an attention that Megatron has built one of this class; its parameters stay."""
        take_over_class(stock, MLASelfAttention, cls, _REPLACED)
        stock._take_over()

    def _take_over(self) -> None:
        for found, what in (
            (
                self.config.cache_mla_latents,
                "support cache_mla_latents, which serves inference: leave --cache-mla-latents out",
            ),
            (
                self.recompute_up_proj,
                "recompute mla_up_proj alone: leave it out of --recompute-modules, or recompute "
                "whole layers",
            ),
            (
                hasattr(self, "linear_qkv_down_proj"),
                "support fused down-projections: leave --mla-down-proj-fusion out",
            ),
        ):
            if found:
                raise ValueError(f"hybrid data parallelism does not {what}")
        self.rotary_pos_emb = at_own_positions(self.rotary_pos_emb)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of one micro-batch.

        Args:
            hidden_states: ``[t, 1, h]``, with sequence parallelism this rank's run of them.
            attention_mask: not used; every sequence is causal within itself.
            packed_seq_params: the micro-batch.

        Returns:
            Like `hidden_states`, and the output projection's bias, which is not added yet.
        """
        if not isinstance(packed_seq_params, HdpPackedSeqParams):
            raise TypeError("latent attention needs HdpPackedSeqParams: run through HdpExecutor")
        cos, sin = self._rotation(packed_seq_params, hidden_states.dtype)
        query = self._query(hidden_states, cos, sin)
        latent, rotated = self._latent(hidden_states)
        rotated = _turned(rotated[:, :, None], cos, sin)
        attention = packed_seq_params.attention
        if isinstance(attention, AttentionByLatent) and attention.latent_travels(
            packed_seq_params.layout
        ):
            out = self._attend_to_latents(query, latent, rotated, attention, packed_seq_params)
        else:
            key, value = self._key_and_value(latent, rotated)
            out = self._attend(query, key, value, packed_seq_params)
        projected, bias = self.linear_proj(out)
        return projected, bias

    def _rotation(
        self, params: HdpPackedSeqParams, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine ``[t, 1, 1, d/2]`` of the tokens' angles, scaled as YaRN wants it."""
        found = self.rotary_pos_emb(params.positions)
        angles, scale = found if isinstance(found, tuple) else (found, 1.0)
        angles, _ = angles.chunk(2, -1)  # of the first of all pairs, and of the second
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)

    def _query(
        self, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """``[t, 1, heads, qk_head_dim + qk_pos_emb_head_dim]``."""
        config = self.config
        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            latent, _ = self.linear_q_down_proj(hidden_states)
            if latent.shape[-1] != config.q_lora_rank:  # each tensor-parallel rank made some
                latent = self._own_tokens(self._whole_channels(latent))
            query, _ = self.linear_q_up_proj(self.q_layernorm(latent))
        query = query.unflatten(-1, (self.num_attention_heads_per_partition, -1))
        plain, rotated = query.split((config.qk_head_dim, config.qk_pos_emb_head_dim), -1)
        return torch.cat((plain, _turned(rotated, cos, sin)), -1)

    def _latent(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The latent of keys and values, and the part of the keys to rotate, ``[t, 1, ...]`` each.

        With sequence parallelism the latent is that of this rank's run of tokens, the other of all.
        What follows uses both for this rank's heads; gradients are summed over all ranks' heads.
        """
        config, sizes = self.config, (self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim)
        both, _ = self.linear_kv_down_proj(hidden_states)
        if both.shape[-1] != sum(sizes):
            latent, rotated = self._whole_channels(both).split(sizes, -1)
            latent, is_whole = self._own_tokens(latent), True
        else:
            latent, rotated = both.split(sizes, -1)
            is_whole = not config.sequence_parallel
        if is_whole:
            rotated = copy_to_tensor_model_parallel_region(rotated, group=self.pg_collection.tp)
        else:
            rotated = gather_from_sequence_parallel_region(rotated, group=self.pg_collection.tp)
        return latent, rotated

    def _key_and_value(
        self, latent: torch.Tensor, rotated: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[t, 1, heads, ...]`` of this rank's heads."""
        config, heads = self.config, self.num_attention_heads_per_partition
        both, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        both = both.unflatten(-1, (heads, -1))
        plain, value = both.split((config.qk_head_dim, config.v_head_dim), -1)
        # a view of values would keep what both are parts of
        return torch.cat((plain, rotated.expand(-1, -1, heads, -1)), -1), value.contiguous()

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: HdpPackedSeqParams,
    ) -> torch.Tensor:
        """``[t, 1, heads * v_head_dim]``."""
        attend = partial(self.core_attention, attention_mask=None, packed_seq_params=params)
        if self.checkpoint_core_attention and self.training:
            out: torch.Tensor = tensor_parallel.checkpoint(attend, False, query, key, value)
            return out
        return attend(query, key, value)

    def _attend_to_latents(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        rotated: torch.Tensor,
        attention: AttentionByLatent,
        params: HdpPackedSeqParams,
    ) -> torch.Tensor:
        """The same, whose ring passes the latent on; keys and values are kept nowhere."""
        projection = self.linear_kv_up_proj
        _gather_parameters(projection)
        latent = normed(self.kv_layernorm(latent), projection, self.config)
        if self.config.sequence_parallel:
            latent = gather_from_sequence_parallel_region(latent, group=self.pg_collection.tp)
        else:
            latent = copy_to_tensor_model_parallel_region(latent, group=self.pg_collection.tp)
        out = attention.latent_ring(
            query[:, 0],
            latent[:, 0],
            rotated[:, 0, 0],
            with_adapter(projection, _AddedByDdp.apply(projection.weight)),
            params.layout,
            params.comm,
            self.core_attention.scale,
            self.core_attention.earlier_keys(params),
            attention.made_heads(params.layout, query.shape[2]),
        )
        return out.reshape(out.shape[0], 1, -1)

    def _whole_channels(self, x: torch.Tensor) -> torch.Tensor:
        return gather_from_tensor_model_parallel_region(x, group=self.pg_collection.tp)

    def _own_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's run of the tokens, where ranks share them; a view would keep all of them."""
        if not self.config.sequence_parallel:
            return x
        return scatter_to_sequence_parallel_region(x, group=self.pg_collection.tp).clone()


def _gather_parameters(projection: torch.nn.Module) -> None:
    """Waits for parameters that Megatron's optimizer may still gather, as a forward pass would."""
    for hook in projection._forward_pre_hooks.values():
        hook(projection, ())


class _AddedByDdp(torch.autograd.Function):
    """A weight whose gradient Megatron's DDP adds to its buffer.

    Layers that add it there themselves, as TransformerEngine's may, mark the weight, and DDP goes
    by the mark of the last backward pass.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.nn.Parameter) -> torch.Tensor:
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        ctx.weight.grad_added_to_main_grad = False
        return gradient


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs of neighbouring channels turned; then the first of all pairs before the second.

    Channels beyond those that have an angle stay (a rotary percentage).
    """
    num_turned = 2 * cos.shape[-1]
    x, rest = x[..., :num_turned], x[..., num_turned:]
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
