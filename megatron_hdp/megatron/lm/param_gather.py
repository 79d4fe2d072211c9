"""``--overlap-param-gather`` where ranks' first micro-batches differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.utils import get_model_config


def start_param_gather(chunks: Sequence[Any]) -> None:
    """Starts to gather what the distributed optimizer has updated, with ``--overlap-param-gather``.

    Megatron starts each bucket's gathering when the forward pass has got to the one before. Ranks
    whose first micro-batches are in different rings would wait for each other: one in a ring for
    the other's slice, that one for a bucket that the first has not got to. So all start here, where
    no rank waits for a ring yet; the forward pass waits for each bucket where it needs it.
    Megatron's schedule of virtual stages, which would start those of the next chunk, starts none.

    Args:
        chunks: Megatron's DDP around each model chunk; its hooks are off where its parameters are
            whole already. Without it (``--skip-train``) nothing is gathered.
    """
    get_model_config(chunks[0]).param_sync_func = None
    for chunk in chunks:
        if (
            not getattr(chunk, "use_forward_hook", False)
            or not chunk.remove_forward_pre_hook_handles
        ):
            continue
        chunk.ddp_config.align_param_gather = True  # its hooks start no bucket
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            if not group.param_gather_dispatched:
                group.start_param_sync()
