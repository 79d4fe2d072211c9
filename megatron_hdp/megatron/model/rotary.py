"""Rotary embedding of packed slices: each token turns by its position in its own sequence.

Megatron asks the embedding for a length and then for the angles of positions 0 .. length-1. This
one answers the first question with the micro-batch's positions and the second with their angles.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_hdp.megatron.model.attention import HdpPackedSeqParams


class OwnPositionRotaryEmbedding(RotaryEmbedding):
    """Megatron's rotary embedding, evaluated at given positions."""

    @classmethod
    def like(cls, stock: RotaryEmbedding) -> OwnPositionRotaryEmbedding:
        """One with the frequencies and settings of `stock`."""
        if type(stock) is not RotaryEmbedding:
            raise ValueError(
                f"hybrid data parallelism knows RotaryEmbedding (--position-embedding-type rope), "
                f"the model has {type(stock).__name__}"
            )
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
        """Angles ``[t, d/2]`` of the positions ``[t]``."""
        seq = max_seq_len.to(self.inv_freq.dtype) + offset
        if self.seq_len_interpolation_factor is not None:
            seq *= 1 / self.seq_len_interpolation_factor
        return torch.outer(seq, self.inv_freq)

    def forward(
        self, max_seq_len: torch.Tensor, offset: int = 0, packed_seq: bool = False, **_: Any
    ) -> torch.Tensor:
        """Angles ``[t, 1, 1, d]`` of the positions that `get_rotary_seq_len` gave."""
        return self.get_emb(max_seq_len, offset)
