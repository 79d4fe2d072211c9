"""All that a step changes before its gradients are agreed on, in one place, and how it is undone.

A step that is run again must find what it found the first time. It changes, before the optimizer:

- gradients and DDP's counts: dropped with the groups, and zeroed when a step begins;
- the expert bias, and the tokens that routers have counted: put back here;
- corrupt documents, failed sources and planner's failures that were counted: put back here;
- whether the model is in evaluation: put back here;
- activations, pools of the offload, messages under way: dropped with the executor.

Position, schedule, what was learnt of costs, metrics and checkpoints change behind the commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_hdp.megatron.step import HdpSteps

_OF_ROUTERS = ("expert_bias", "local_tokens_per_expert")


class BeforeCommit:
    """What a step finds, to be put back if it does not come to its commit.

    Args:
        chunks: of the model.
        steps: of training and of validation, if there are some.
    """

    def __init__(self, chunks: list[Any], steps: list[HdpSteps]) -> None:
        self._counts = [one.kept() for one in steps]
        self._tensors = [one.clone() for one in _of_routers(chunks)]

    def counts(self) -> list[dict[str, Any]]:
        """What steps had counted, for those who join."""
        return self._counts

    def put_back(self, chunks: list[Any]) -> None:
        """Puts back what belongs to the model, also under another wrapper."""
        for one, before in zip(_of_routers(chunks), self._tensors, strict=True):
            one.copy_(before)
        for chunk in chunks:
            chunk.train()
            for module in chunk.modules():
                if hasattr(module, "losses") and hasattr(module, "expert_bias"):
                    module.losses.clear()


def _of_routers(chunks: list[Any]) -> Iterator[torch.Tensor]:
    for chunk in chunks:
        for module in chunk.modules():
            for name in _OF_ROUTERS:
                found = vars(module).get(name, module._buffers.get(name))
                if torch.is_tensor(found):
                    yield found
