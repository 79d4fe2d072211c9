"""Block kernels: attention of some queries over some keys, with its log-sum-exp.

Design: `docs/design/gpu.md`.
"""

from megatron_hdp.runtime.kernels.block import AttentionKernel, CpuFlashKernel
from megatron_hdp.runtime.kernels.flash import FlashAttnKernel, TorchFlashKernel, refusal
from megatron_hdp.runtime.kernels.matmul import MatmulKernel
from megatron_hdp.runtime.kernels.padded import PaddedKernel
from megatron_hdp.runtime.kernels.segments import (
    Block,
    Forward,
    Gradients,
    Segments,
    longest_class,
)

__all__ = [
    "AttentionKernel",
    "Block",
    "CpuFlashKernel",
    "FlashAttnKernel",
    "Forward",
    "Gradients",
    "MatmulKernel",
    "PaddedKernel",
    "Segments",
    "TorchFlashKernel",
    "longest_class",
    "refusal",
]
