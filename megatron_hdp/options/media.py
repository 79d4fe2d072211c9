"""What a run is told of pictures, videos and sounds: who makes rows of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_hdp.options.declaration import option

PATCHES_PER_PACK = 16_384
BALANCES = ("home", "replica", "micro-batch", "step")


@dataclass(frozen=True, kw_only=True)
class MediaOptions:
    """Pictures, videos and sound."""

    hdp_encoder: Path | None = option(
        None,
        metavar="DIR",
        help="Folder of a model of pictures, videos or sound as Hugging Face lays it out: its "
        "encoder is trained with the language model. A checkpoint that is resumed has its weights "
        "instead. Default: text alone.",
    )
    hdp_encoder_patches: int = option(
        PATCHES_PER_PACK,
        metavar="N",
        minimum=1,
        help="Patches of pictures that a rank encodes in one call, at most: its activations are "
        "kept until it has gone backward. A larger picture is a call of its own.",
    )
    hdp_item_costs: Path | None = option(
        None,
        metavar="FILE",
        help="What pictures cost in the encoder, as `megatron-hdp profile` with --hdp-encoder "
        "measures it. Default: by the encoder's shape.",
    )
    hdp_media_balance: str = option(
        "step",
        choices=BALANCES,
        help="Who encodes what: the rank whose sequences hold it, the ranks of its replica, all "
        "ranks for each micro-batch, or all ranks for the whole step.",
    )
    hdp_encoder_rows: int | None = option(
        None,
        metavar="N",
        minimum=1,
        help="Rows of pictures that a rank holds on its device, at most, beside those of the "
        "micro-batches that run. In a step of more rows wait in host memory, and travel in more "
        "waves. Default: no limit.",
    )
    hdp_media_waves: int | None = option(
        None,
        auto=True,
        metavar="auto|N",
        minimum=1,
        help="Exchanges in which rows of pictures travel in a step: a micro-batch waits for those "
        "of its own and earlier ones alone, so that late pipeline stages encode while the first "
        "one computes. auto: as many as make a step of stages shortest, else one.",
    )
