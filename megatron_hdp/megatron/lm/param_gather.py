"""``--overlap-param-gather`` where ranks' first micro-batches differ."""

from __future__ import annotations

from typing import Any


def start_param_gather(model: Any) -> None:
    """Starts to gather what the distributed optimizer has updated, with ``--overlap-param-gather``.

    Megatron starts each bucket's gathering when the forward pass has got to the one before. Ranks
    whose first micro-batches are in different rings would wait for each other: one in a ring for
    the other's slice, that one for a bucket that the first has not got to. So all start here, where
    no rank waits for a ring yet; the forward pass waits for each bucket where it needs it.

    Args:
        model: Megatron's DDP; its hooks are off where its parameters are whole already.
    """
    if not model.use_forward_hook or not model.remove_forward_pre_hook_handles:
        return
    for group in model.bucket_groups + model.expert_parallel_bucket_groups:
        if not group.param_gather_dispatched:
            group.start_param_sync()
