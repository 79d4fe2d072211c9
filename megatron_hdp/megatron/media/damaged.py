"""Damaged pictures, videos and sounds: their sequences carry no loss in the step, on any rank.

A size comes from a header when a source is prepared; whether the body is whole is known once it is
decoded, by the one rank that encodes it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from megatron_hdp.data.media import StoredItem
from megatron_hdp.megatron.media.items import ItemHolder
from megatron_hdp.megatron.parallel import compute_device, say
from megatron_hdp.runtime.gathering import gathered, largest, on_every_rank


def agree_on_damages(
    batch: ItemHolder, damages_here: Callable[[], dict[int, str]], most_in_a_row: int
) -> dict[int, str]:
    """Leaves sequences with damaged items out of a step's loss.

    Every rank must call this.

    Args:
        batch: the same on every rank.
        damages_here: why items of this rank are damaged, which are grey or silent then;
            raises a ValueError where a file cannot be read.
        most_in_a_row: sequences with items that may be damaged one after another.

    Returns:
        Why sequences are damaged, by their place in the batch.

    Raises:
        EveryRankError: more were damaged, or a file cannot be read.
    """
    if not any(isinstance(one.data, StoredItem) for one in batch.media):
        return {}
    device = compute_device()
    damages = on_every_rank(damages_here, device)
    if not largest([len(damages)], device)[0]:
        return {}
    whys = {item: why for of_rank in gathered(damages) for item, why in of_rank.items()}
    damaged = {batch.media[item].sequence: whys[item] for item in sorted(whys)}
    on_every_rank(partial(_require_few, batch, damaged, most_in_a_row), device)
    for sequence, why in sorted(damaged.items()):
        begin = int(batch.offsets[sequence])
        batch.loss_mask[begin : begin + int(batch.lengths[sequence])] = False
        say(f"left sequence {sequence} of the step out of training: {why}")
    return damaged


def _require_few(batch: ItemHolder, damaged: dict[int, str], most_in_a_row: int) -> None:
    in_a_row = 0
    for sequence in sorted({one.sequence for one in batch.media}):
        in_a_row = in_a_row + 1 if sequence in damaged else 0
        if in_a_row > most_in_a_row:
            raise ValueError(
                f"the pictures, videos or sounds of {in_a_row} sequences in a row are damaged, the "
                f"last: {damaged[sequence]}; expected whole ones: copy them again, prepare their "
                "source again, or raise --hdp-corrupt-limit"
            )
