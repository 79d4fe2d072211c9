"""PyTorch's norms under sequence parallelism, where megatron-core itself wants apex's or TE's."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig


class SequenceParallelNorm:
    """Builds the norm that megatron-core would build without sequence parallelism.

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
