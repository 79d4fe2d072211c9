"""An encoder of pictures or sound in a Megatron-LM checkout: read, and missing from checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from megatron_hdp.encoders import load_encoder
from megatron_hdp.megatron.adapters import is_of_encoder
from megatron_hdp.megatron.checkpoint.folder import CheckpointFolder
from megatron_hdp.megatron.checkpoint.reading import holds_encoder
from megatron_hdp.megatron.checkpoint.together import on_first_rank
from megatron_hdp.megatron.lm.adapters import some_weights
from megatron_hdp.options import OptionError


def read_encoder(args: argparse.Namespace) -> torch.nn.Module:
    """The encoder of the folder that --hdp-encoder names, in the model's type."""
    return load_encoder(
        args.hdp_encoder,
        dtype=args.params_dtype,
        patches_per_pack=args.hdp_encoder_patches,
        costs=args.hdp_item_costs,
    )


def is_missing(args: argparse.Namespace) -> bool:
    """Whether a run has an encoder, and what it loads is a model of text alone.

    Every rank must call this, before Megatron loads.

    Raises:
        OptionError: the optimizer's state would be loaded, too.
    """
    if args.hdp_encoder is None:
        return False
    source, is_resumed = on_first_rank(partial(_source, args))
    if source is None or holds_encoder(source):
        return False
    if is_resumed and not (args.finetune or args.no_load_optim):
        raise OptionError(
            f"--hdp-encoder: found no encoder in {source}, expected one, because its optimizer's "
            "state is loaded as well: add --finetune to start at step 0 from its weights, and from "
            f"the encoder of {args.hdp_encoder}"
        )
    return True


def left_out(chunks: Sequence[Any]) -> AbstractContextManager[None]:
    """Within it parts of a model give and take all but their encoder."""
    return some_weights(chunks, lambda name: not is_of_encoder(name))


def _source(args: argparse.Namespace) -> tuple[Path | None, bool]:
    """The checkpoint that Megatron will load, if it is distributed; whether it is --load's."""
    step = getattr(args, "ckpt_step", None)
    for folder in (args.load, getattr(args, "pretrained_checkpoint", None)):
        if folder is None:
            continue
        found = CheckpointFolder(Path(folder))
        source = found.newest() if step is None or folder != args.load else found.find(step)
        if source is not None and dist_checkpointing.check_is_distributed_checkpoint(str(source)):
            return source, folder == args.load
    return None, False
