"""When gradients are reduced with ``--overlap-grad-reduce``: in the last backward, or behind it.

Megatron's DDP reduces a bucket as soon as the last micro-batch's backward has filled it. On a GPU
that may hang where another rank still waits for this one, see `planner.lockstep.end_together`.
There the reductions begin after the last backward, in the same order. So they do with several model
chunks: behind the last backward of one come others of the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from megatron.core.distributed import DistributedDataParallel


class GradSync:
    """Says to Megatron's schedule and DDP when the gradients of a step are reduced.

    It sets the ``no_sync_func`` of the model's configuration. Chunks that only evaluate may lack
    Megatron's DDP.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], config: Any) -> None:
        chunks = [one for one in chunks if isinstance(one, DistributedDataParallel)]
        self._chunks = chunks
        self._config = config
        self._in_backward = False
        self._groups = [group for chunk in reversed(chunks) for group in _by_layer(chunk)]

    @contextmanager
    def during(self, ends_together: bool) -> Iterator[None]:
        """Around a step's schedule, in whose last backward reductions may begin or may not."""
        self._in_backward = ends_together and len(self._chunks) == 1
        if self._in_backward:
            self._config.no_sync_func = self._chunks[0].no_sync
            yield
            return
        self._config.no_sync_func = nullcontext
        with ExitStack() as stack:
            for chunk in self._chunks:
                stack.enter_context(chunk.no_sync())
            yield

    @contextmanager
    def held_back(self, is_held: bool = True) -> Iterator[None]:
        """Around the backward of a part that others follow: nothing is complete, or reduced."""
        if not is_held or not self._in_backward or not _is_last(self._chunks[0]):
            yield
            return
        with self._chunks[0].no_sync():
            yield

    def begin(self) -> None:
        """Starts the reductions that have not begun in the last backward; waits for none."""
        if not self._chunks[0].ddp_config.overlap_grad_reduce:
            return  # finishing them starts them
        for group in self._groups:
            if group.is_first_batch or not self._in_backward:  # in the first, hooks only count
                group.start_grad_sync()


def _is_last(model: DistributedDataParallel) -> bool:
    """Whether Megatron's schedule is in its last backward."""
    groups = model.bucket_groups + model.expert_parallel_bucket_groups
    return any(one.is_last_microbatch for one in groups)


def _by_layer(model: DistributedDataParallel) -> list[Any]:
    """The groups of buckets in the order in which backward fills them, experts' between others'.

    Ranks that reduce in their backward and ranks that begin behind it launch in the same order on
    all communicators.
    """
    place = {id(one): number for number, one in enumerate(model.parameters())}

    def first_layer(group: Any) -> int:
        return min(place[id(one)] for bucket in group.buckets for one in bucket.params)

    groups = model.bucket_groups + model.expert_parallel_bucket_groups
    return sorted(groups, key=first_layer, reverse=True)
