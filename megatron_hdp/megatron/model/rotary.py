"""Rotary embedding of packed slices: each token turns by its position in its own sequence.

Megatron asks the embedding for a length and then for the angles of positions 0 .. length-1. This
one answers the first question with the micro-batch's positions and the second with their angles.
The frequencies are those of Megatron's own embedding, scaled or not.

TransformerEngine's fused kernel turns row `s` of ``[s, b, heads, d]`` by row `s` of the angles
(transformer_engine/common/fused_rope/fused_rope.cu, format SBHD). To Megatron a micro-batch is one
sequence ``[t, 1, heads, d]``, so each token is turned by its own angles there, too.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings import YarnRotaryEmbedding, rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_attr_wrapped_model

from megatron_hdp.media import MRope
from megatron_hdp.megatron.model.attention import HdpPackedSeqParams
from megatron_hdp.megatron.options import (
    TrainingArguments,
    layers_without_positions,
    planned_layers,
)
from megatron_hdp.megatron.parallel import compute_device

_NUM_INDICES = 2**31  # of a tensor, as the kernel counts values in 32 bits


def position_settings(arguments: TrainingArguments) -> dict[str, Any]:
    """What ``TransformerConfig`` needs to know of positions."""
    skipped = layers_without_positions(arguments)
    return {
        "rotary_interleaved": arguments.rotary_interleaved,
        "no_rope_freq": None if skipped is None else list(skipped),
    }


def yarn_attributes(arguments: TrainingArguments) -> dict[str, Any]:
    """What Megatron's GPT and its attention look up in their configuration, no field of it."""
    if arguments.position_embedding_type != "yarn":
        return {}
    return {
        "yarn_rotary_scaling_factor": arguments.rotary_scaling_factor,
        "yarn_original_max_position_embeddings": arguments.yarn_original_max_position_embeddings,
        "yarn_beta_fast": arguments.yarn_beta_fast,
        "yarn_beta_slow": arguments.yarn_beta_slow,
        "yarn_mscale": arguments.mscale,
        "yarn_mscale_all_dim": arguments.mscale_all_dim,
        "yarn_correction_range_round_to_int": arguments.yarn_correction_range_round_to_int,
    }


def fused_kernel_is_there() -> bool:
    """Whether this rank has a GPU and TransformerEngine's kernel for it."""
    kernel = getattr(rope_utils, "fused_apply_rotary_pos_emb", None)
    return kernel is not None and compute_device().type == "cuda"


def fused_kernel_can_count(arguments: TrainingArguments) -> bool:
    """Whether queries, keys and values of any micro-batch have fewer than 2^31 values on a rank.

    With offload a micro-batch may have more tokens than the capacity; but two layers' activations
    stay on the device.
    """
    heads = arguments.num_attention_heads + 2 * (arguments.num_query_groups or 0)
    values = heads * arguments.kv_channels // arguments.tensor_model_parallel_size
    tokens = arguments.hdp_tokens_per_rank or arguments.seq_length * arguments.micro_batch_size
    if arguments.hdp_offload != "off":
        tokens = max(tokens, tokens * planned_layers(arguments) // 2)
    return tokens * values < _NUM_INDICES


class OwnPositionRotaryEmbedding(RotaryEmbedding):
    """Megatron's rotary embedding, evaluated at given positions.

    Attributes:
        axes: of each frequency, the axis whose position it turns by (`turn_by_axes`).
    """

    axes: torch.Tensor | None = None

    @classmethod
    def like(cls, stock: RotaryEmbedding) -> OwnPositionRotaryEmbedding:
        """One with the frequencies and settings of `stock`."""
        rotary = cls.__new__(cls)
        rotary.__dict__.update(stock.__dict__)
        return rotary

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The micro-batch's positions, which Megatron hands on to `forward`."""
        if not isinstance(packed_seq_params, HdpPackedSeqParams):
            raise TypeError("rotary positions need HdpPackedSeqParams: run through HdpExecutor")
        return packed_seq_params.positions

    def get_freqs_non_repeated(self, max_seq_len: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """Angles ``[t, d/2]`` of the positions ``[t]``, or ``[3, t]`` in time, height, width."""
        seq = max_seq_len.to(self.inv_freq.dtype) + offset
        if self.seq_len_interpolation_factor is not None:
            seq *= 1 / self.seq_len_interpolation_factor
        if seq.dim() > 1:
            assert self.axes is not None, "turn_by_axes has been called"
            return seq[self.axes.to(seq.device)].T * self.inv_freq
        return torch.outer(seq, self.inv_freq)

    def forward(
        self, max_seq_len: torch.Tensor, offset: int = 0, packed_seq: bool = False, **_: Any
    ) -> torch.Tensor:
        """Angles ``[t, 1, 1, d]`` of the positions that `get_rotary_seq_len` gave."""
        return self.get_emb(max_seq_len, offset)


class OwnPositionYarnEmbedding(OwnPositionRotaryEmbedding):
    """Megatron's YaRN embedding at given positions: angles, and what queries and keys grow by."""

    concentration: float
    """Factor of sines and cosines."""

    @classmethod
    def like(cls, stock: YarnRotaryEmbedding) -> OwnPositionYarnEmbedding:
        """One with the frequencies and settings of `stock`, without its table of sines."""
        rotary = super().like(stock)
        angles, rotary.concentration = stock.get_emb(2)
        rotary.inv_freq = angles[1, 0, 0].chunk(2)[0].clone()  # position 1 turns by frequencies
        rotary.seq_len_interpolation_factor = None  # Megatron's YaRN leaves it out
        rotary._buffers = {}
        return rotary

    def forward(
        self, max_seq_len: torch.Tensor, offset: int = 0, packed_seq: bool = False, **_: Any
    ) -> tuple[torch.Tensor, float]:
        """Angles ``[t, 1, 1, d]`` of the positions that `get_rotary_seq_len` gave, the factor."""
        return self.get_emb(max_seq_len, offset), self.concentration


_OWN: dict[type[RotaryEmbedding], type[OwnPositionRotaryEmbedding]] = {
    RotaryEmbedding: OwnPositionRotaryEmbedding,
    YarnRotaryEmbedding: OwnPositionYarnEmbedding,
}


def at_own_positions(stock: RotaryEmbedding) -> OwnPositionRotaryEmbedding:
    """The embedding of packed slices that has the frequencies of Megatron's.

    Raises:
        ValueError: it is another kind.
    """
    if type(stock) not in _OWN:
        raise ValueError(
            f"hybrid data parallelism knows {' and '.join(one.__name__ for one in _OWN)} "
            f"(--position-embedding-type rope or yarn), the model has {type(stock).__name__}"
        )
    return _OWN[type(stock)].like(stock)


def give_own_positions(model: GPTModel) -> None:
    """Replaces the model's rotary embedding, where it has one."""
    if hasattr(model, "rotary_pos_emb"):
        model.rotary_pos_emb = at_own_positions(model.rotary_pos_emb)


def turn_by_axes(chunk: Any, mrope: MRope | None) -> None:
    """Lets a part of a model turn by positions on three axes, where it is given them.

    Raises:
        ValueError: it has no rotary embedding with these frequencies.
    """
    model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
    rotary = getattr(model, "rotary_pos_emb", None)
    if mrope is None:
        if isinstance(rotary, OwnPositionRotaryEmbedding):
            rotary.axes = None
        return
    if not isinstance(rotary, OwnPositionRotaryEmbedding):
        raise ValueError(
            "found a model whose positions are not rotary, or by latent attention, expected "
            "--position-embedding-type rope or yarn: the encoder's rows have positions in time, "
            "height and width"
        )
    if len(rotary.inv_freq) != mrope.num:
        raise ValueError(
            f"found {len(rotary.inv_freq)} rotary frequencies, expected {mrope.num}: the encoder's "
            f"mrope_section is {list(mrope.sections)}. Take the flags of the model it belongs to"
        )
    rotary.axes = torch.from_numpy(mrope.axes())
