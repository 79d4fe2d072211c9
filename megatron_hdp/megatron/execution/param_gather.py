"""When parameters are gathered (``--overlap-param-gather``): ahead of the forward pass, or in it.

The distributed optimizer leaves each rank its shard of what it has updated. Megatron's DDP gathers
a bucket of layers when the forward pass has got to the one before. Ranks whose first micro-batches
are in different rings would wait for each other: one in a ring for the other's slice, that one for
a bucket that the first has not got to. So all gathers start here, before a rank waits for a ring;
the forward pass waits for each bucket where it needs it.

With one hardware queue (`runtime.cuda.settings.connections`) this would cost the overlap: gathers
run one after another, and a launched one that waits for those before it holds up what is launched
behind it, which is the forward pass. There Megatron's order is right, where all ranks begin
together (`planner.lockstep.begin_together`), as our plans do: a member of a ring then waits for
others that are in the same layer of the same micro-batch, so that no gather waits for a ring that
waits for it. Several model chunks begin behind other micro-batches, so theirs start here.

With gloo one runs at a time. With several under way, ranks on a busy machine died of a corrupted
heap or waited for ever inside gloo's coalesced gather (seen with PyTorch 2.13, in three of nine
runs of 150 steps); nothing is lost, as a CPU has nothing to run beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_hdp.megatron.parallel import compute_device
from megatron_hdp.runtime.cuda import has_one_queue


def start_param_gather(chunks: Sequence[Any], begins_together: bool) -> None:
    """Starts to gather what the optimizer has updated; call it before a step's first forward.

    DDP's hooks are off where its parameters are whole already; without DDP nothing is gathered.

    Args:
        chunks: a rank's parts of the model.
        begins_together: see `planner.lockstep.begin_together`; the same on all ranks.
    """
    get_model_config(chunks[0]).param_sync_func = None  # of the schedule of virtual stages
    in_forward = begins_together and len(chunks) == 1 and has_one_queue()
    for chunk in chunks:
        if not _gathers(chunk):
            continue
        chunk.ddp_config.align_param_gather = not in_forward  # whether its hooks start no bucket
        for groups in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups):
            # the last one holds the first layers
            for group in groups[-1:] if in_forward else groups[::-1]:
                if not group.param_gather_dispatched:
                    group.start_param_sync()
                    if compute_device().type == "cpu":
                        group.param_gather_handle.wait()


def finish_param_gather(chunks: Sequence[Any]) -> None:
    """Waits for what no forward pass of a step has waited for; call it behind a step's last one.

    An encoder without items does not run, and the optimizer is about to write into its buckets.
    """
    for chunk in chunks:
        if not _gathers(chunk):
            continue
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if group.param_gather_handle is not None:
                group.start_param_sync(force_sync=True)  # waits, and starts nothing


def make_whole(chunk: Any, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Waits until some parameters are gathered, which are read before a step's first forward.

    Every rank that has the same part of the model must call this, before `start_param_gather`.
    """
    if not _gathers(chunk):
        return
    wanted = {id(one) for one in parameters}
    for group in chunk.bucket_groups[::-1]:
        if any(id(one) in wanted for bucket in group.buckets for one in bucket.params):
            group.start_param_sync(force_sync=True)


def _gathers(chunk: Any) -> bool:
    """Whether a part of the model has parameters to gather."""
    return bool(getattr(chunk, "use_forward_hook", False) and chunk.remove_forward_pre_hook_handles)


def make_parameters_whole(chunks: Sequence[Any]) -> None:
    """Waits until all parameters are gathered: an evaluation or a checkpoint is to read them.

    Every rank must call this, behind an optimizer step, not between a step's forward passes.
    """
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
