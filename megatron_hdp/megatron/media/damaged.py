"""Pictures that turn out to be damaged: their sequences carry no loss in the step, on any rank.

A picture's size comes from its header when a source is prepared; whether its body is whole is known
once it is decoded, by the one rank that encodes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from megatron_hdp.data.media import PictureError, StoredPicture
from megatron_hdp.data.tokenizers import available_cpus
from megatron_hdp.megatron.media.items import ItemHolder
from megatron_hdp.megatron.parallel import compute_device, say
from megatron_hdp.runtime.gathering import gathered, largest, on_every_rank


def decode_pictures(batch: ItemHolder, mine: Sequence[int], most_in_a_row: int) -> dict[int, str]:
    """Decodes the stored pictures that this rank encodes, with all processors that it has.

    Of a sequence with a damaged one no token is trained, and grey stands for the picture. Every
    rank must call this.

    Args:
        batch: the same on every rank.
        mine: items of this rank.
        most_in_a_row: sequences with pictures that may be damaged one after another.

    Returns:
        Why sequences are damaged, by their place in the batch.

    Raises:
        EveryRankError: more were damaged, or a file cannot be read.
    """
    if not any(isinstance(one.data, StoredPicture) for one in batch.media):
        return {}
    device = compute_device()
    damages = on_every_rank(partial(_damages, batch, mine), device)
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


def _damages(batch: ItemHolder, mine: Sequence[int]) -> dict[int, str]:
    """Why pictures of this rank are damaged, which are grey then."""

    def why(item: int) -> str | None:
        picture = batch.media[item].data
        if isinstance(picture, StoredPicture):
            try:
                _ = picture.pixels
            except PictureError as error:
                picture.make_grey()
                return str(error)
        return None

    try:
        with ThreadPoolExecutor(max(1, available_cpus())) as pool:
            found = dict(zip(mine, pool.map(why, mine), strict=True))
    except OSError as error:
        raise ValueError(
            f"a picture cannot be read: {error}; expected the files of a prepared source to stay"
        ) from error
    return {item: words for item, words in found.items() if words is not None}


def _require_few(batch: ItemHolder, damaged: dict[int, str], most_in_a_row: int) -> None:
    in_a_row = 0
    for sequence in sorted({one.sequence for one in batch.media}):
        in_a_row = in_a_row + 1 if sequence in damaged else 0
        if in_a_row > most_in_a_row:
            raise ValueError(
                f"the pictures of {in_a_row} sequences in a row are damaged, the last: "
                f"{damaged[sequence]}; expected whole ones: copy them again, prepare their source "
                "again, or raise --hdp-corrupt-limit"
            )
