"""The ``core_attention`` of megatron-core under HDP: the ring travels with the micro-batch.

The layout is carried in the packed-sequence parameters, never in a global: recomputation runs a
micro-batch's forward again later, when another one would be current.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import fp8_utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)

from megatron_hdp.arrays import Int64Array
from megatron_hdp.megatron.model.last_stage import LastStage
from megatron_hdp.megatron.model.mtp import FurtherTokens
from megatron_hdp.runtime.attention import AttentionBackend
from megatron_hdp.runtime.loss import LossSums, RoutedCounts
from megatron_hdp.runtime.ring import EarlierKeys, RingComm, TokenLayout

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
_REFUSED = {
    "fp16": "its range needs a scaled loss; use bf16",
    "batch_invariant_mode": "how keys are split between blocks depends on the plan",
    "qk_clip": "the kernels keep no logits",
    "log_max_attention_logit": "the kernels keep no logits",
    "fp4": "use bf16",
    "quant_recipe": "it gives FP8 to single layers; use fp8 and fp8_recipe",
    "fp8_dot_product_attention": "rings pass on bfloat16",
    "fp8_multi_head_attention": "rings pass on bfloat16",
}
"""What Megatron's core attention takes from its configuration and this one refuses, and why."""


@dataclass
class HdpPackedSeqParams(PackedSeqParams):
    """What attention and rotary positions need to know of one micro-batch on this rank.

    ``qkv_format`` stays "sbhd": to Megatron the packed tokens are one sequence ``[t, 1, ...]``.
    """

    layout: TokenLayout = field(kw_only=True)
    positions: torch.Tensor = field(kw_only=True)
    """int64 ``[t]``: each token's position in its own sequence; ``[3, t]`` of its own axes each,
    where `turn_by_axes` was told of them."""
    tokens: Int64Array | None = field(kw_only=True, default=None)
    """``[t]``, on the host: ids, or what `rows_for_marks` knows rows by; None where no model is
    run."""
    sequence_index: torch.Tensor = field(kw_only=True)
    """int64 ``[t]``: place among the micro-batch's sequences of each token's, -1 for padding."""
    comm: RingComm = field(kw_only=True)
    attention: AttentionBackend = field(kw_only=True)
    loss_sums: LossSums | None = field(kw_only=True, default=None)
    """Where the fused loss adds up the tokens' losses by source."""
    routed: RoutedCounts = field(kw_only=True)
    """What the routers of experts counted."""
    is_whole_loss: bool = field(kw_only=True, default=False)
    """Whether backward follows once, from the fused loss as it is, with a gradient of 1."""
    further: FurtherTokens | None = field(kw_only=True, default=None)
    """What is predicted behind labels; None where nothing is, or in evaluation."""
    earlier: Mapping[int, EarlierKeys] | None = field(kw_only=True, default=None)
    """Where these are a part's tokens: of each layer, by its attention, keys of earlier parts."""
    loss_head: Callable[[LastStage], torch.Tensor] | None = field(kw_only=True, default=None)
    """What makes the loss's sum at the end of the model, instead of the cross entropy of labels."""


class HdpCoreAttention(MegatronModule):
    """The job's attention backend with the interface of megatron-core's ``DotProductAttention``."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _refuse(attention_type != "self", f"attention type {attention_type!r}", "self attention")
        _refuse(attn_mask_type not in _CAUSAL, f"a mask of kind {attn_mask_type}", "a causal one")
        _refuse(dropout > 0, f"attention dropout {dropout}", "--attention-dropout 0")
        for name, why in _REFUSED.items():
            _refuse(bool(getattr(config, name, False)), name, f"none: {why}")
        _refuse(
            config.context_parallel_size > 1,
            f"context parallel size {config.context_parallel_size}",
            "--context-parallel-size 1: HDP forms its own rings",
        )
        self.layer_number = layer_number
        self.window = _window_of(config, layer_number)
        # apply_query_key_layer_scaling changes nothing: what Megatron divides the scores by for the
        # range of float16, its softmax multiplies them by
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp"])
        self._tensor_group = groups.tp
        self._make_sink()

    def _make_sink(self) -> None:
        """A score for each of this tensor-parallel rank's heads, under stock's name."""
        heads = self.config.num_attention_heads // self._tensor_group.size()
        sink = torch.zeros(heads, dtype=self.config.params_dtype)
        if self.config.softmax_type == "learnable":
            self.softmax_offset = _part_of_tensor_ranks(torch.nn.Parameter(sink))
        else:
            is_there = self.config.softmax_type == "off-by-one"
            self.register_buffer("softmax_offset", sink if is_there else None, persistent=False)

    def take_over(self, stock: torch.nn.Module) -> None:
        """Puts the learnt sink of Megatron's attention in the place of this one's."""
        if self.config.softmax_type == "learnable":
            self.softmax_offset = _part_of_tensor_ranks(stock.softmax_offset)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attention of one micro-batch.

        Args:
            query: ``[t, 1, heads, d]``.
            key: ``[t, 1, kv_heads, d]``.
            value: ``[t, 1, kv_heads, d]``; under multi-latent attention of a size of its own.
            attention_mask: not used; every sequence is causal within itself.
            attn_mask_type: not used, likewise.
            attention_bias: must be None.
            packed_seq_params: the micro-batch.

        Returns:
            ``[t, 1, heads * d]``.
        """
        params = packed_seq_params
        if not isinstance(params, HdpPackedSeqParams):
            raise TypeError(
                f"HDP attention got {type(params).__name__} as packed_seq_params, expected "
                "HdpPackedSeqParams: run the model through HdpExecutor"
            )
        _refuse(attention_bias is not None, "an attention bias", "no bias")
        how: dict[str, Any] = {"window": self.window, "sink": self.softmax_offset}
        if (earlier := self.earlier_keys(params)) is not None:
            how["earlier"] = earlier
        with self._without_fp8():
            out = params.attention(
                query.squeeze(1),
                key.squeeze(1),
                value.squeeze(1),
                params.layout,
                params.comm,
                self.scale,
                **how,
            )
        return out.reshape(out.shape[0], 1, -1)

    def earlier_keys(self, params: HdpPackedSeqParams) -> EarlierKeys | None:
        """What parts of the micro-batch keep of this layer for later ones."""
        if params.earlier is None:
            return None
        return params.earlier[id(self)]  # MTP layers may be numbered anew

    def _without_fp8(self) -> AbstractContextManager[Any]:
        """Attention stays in BF16, as it was tried at the start, whatever the layer around it."""
        if not getattr(self.config, "fp8", None) or not fp8_utils.HAVE_TE:
            return nullcontext()
        library = importlib.import_module("transformer_engine.pytorch")
        off = getattr(library, "autocast", None) or library.fp8_autocast  # the older one's name
        context: AbstractContextManager[Any] = off(enabled=False)
        return context

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """What a checkpoint holds: the learnt sink, if there is one, cut over tensor ranks."""
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._tensor_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )
        return sharded


def _window_of(config: TransformerConfig, layer_number: int) -> int | None:
    """Tokens that a query of the layer sees, itself included; None where it sees all before it."""
    if not is_layer_window_attention(
        config.window_size, config.window_attn_skip_freq, layer_number
    ):
        return None
    before, behind = config.window_size
    _refuse(before < 0 or behind != 0, f"a window of {before},{behind}", "--window-size N,0")
    return int(before) + 1


def _part_of_tensor_ranks(sink: torch.nn.Parameter) -> torch.nn.Parameter:
    """Marks it as a part of a larger parameter, which Megatron forgets to.

    Its gradient norm would count the part of one tensor-parallel rank only.
    """
    marks = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}
    for name, value in marks.items():
        setattr(sink, name, value)
    return sink


def _refuse(condition: bool, found: str, expected: str) -> None:
    if condition:
        raise ValueError(f"hybrid data parallelism does not support {found}; use {expected}")
