"""What is decided in the environment before CUDA starts; each setting has its function and reason.

`prepare` decides, `describe` tells people. `numa.bind` comes later, once a rank's GPU is known.
Nothing here imports torch, so that it can run first.

Design: `docs/design/gpu.md`.
"""

from megatron_hdp.runtime.cuda.device import Run, compute_capability, pci_address, run_of
from megatron_hdp.runtime.cuda.preparation import describe, prepare
from megatron_hdp.runtime.cuda.settings import has_one_queue

__all__ = [
    "Run",
    "compute_capability",
    "describe",
    "has_one_queue",
    "pci_address",
    "prepare",
    "run_of",
]
