"""What the standalone trainer is told of pictures and sound: who makes rows of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_hdp.options.declaration import option

BALANCES = ("home", "replica", "micro-batch", "step")


@dataclass(frozen=True, kw_only=True)
class MediaOptions:
    """Pictures and sound."""

    hdp_encoder: Path | None = option(
        None,
        metavar="DIR",
        help="Folder of a model of pictures or sound as Hugging Face lays it out: its encoder is "
        "trained with the language model. A checkpoint that is resumed has its weights instead. "
        "Default: text alone.",
    )
    hdp_media_balance: str = option(
        "step",
        choices=BALANCES,
        help="Who encodes what: the rank whose sequences hold it, the ranks of its replica, all "
        "ranks for each micro-batch, or all ranks for the whole step.",
    )
