"""What a GPU holds that PyTorch does not count: CUDA's context, libraries, NCCL's communicators.

Once a step has run, all of it is there. The memory model (`planner.memory`) takes it as measured.
"""

from __future__ import annotations

import torch

from megatron_hdp.runtime.gathering import largest


def runtime_bytes(device: torch.device) -> int:
    """Bytes of it on the fullest GPU of the job, other processes' included; 0 without GPUs.

    Every rank must call this.
    """
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    (found,) = largest([total - free - torch.cuda.memory_reserved(device)], device)
    return found
