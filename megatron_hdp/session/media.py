"""Images and other items among the tokens of a session's batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_hdp.data.steps import RankMicroBatch
from megatron_hdp.megatron.media import BatchMedia, JobEncoder
from megatron_hdp.session.batch import CheckedBatch


def with_items(batch: CheckedBatch, encoder: JobEncoder | None) -> CheckedBatch:
    """The batch, once it is known what its items need.

    Raises:
        ValueError: items without an encoder, or that do not fit into their sequences.
    """
    if batch.media:
        if encoder is None:
            raise ValueError(
                f"found {len(batch.media)} items in the batch and no encoder, expected one: call "
                "attach_encoder first"
            )
        batch.items = BatchMedia.of(batch, encoder.encoder)
    return batch


@contextmanager
def rows_in_place(
    batch: CheckedBatch,
    micro_batches: tuple[RankMicroBatch, ...],
    divisor: float,
    forward_only: bool,
) -> Iterator[tuple[RankMicroBatch, ...]]:
    """Within it the model sees the rows of a batch's items; nothing, where it has none.

    Yields the micro-batches that are to run. Behind it the encoder's weights have gradients.
    """
    if batch.step_media is None:
        yield micro_batches
        return
    weights = [one for one in batch.step_media.job.encoder.parameters() if one.requires_grad]
    learns = bool(weights) and not forward_only
    with batch.step_media.rows_in_place(micro_batches, learns=learns) as placed:
        yield placed
    if not learns:
        return
    batch.step_media.differentiate()
    for weight in weights:
        summed = torch.zeros_like(weight) if weight.grad is None else weight.grad
        dist.all_reduce(summed)
        weight.grad = summed / divisor
