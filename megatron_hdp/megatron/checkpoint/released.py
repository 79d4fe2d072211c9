"""A checkpoint of weights that no run has saved: what lies in it besides the tensors' files.

Megatron takes one whose tracker says `release` for the beginning of a run: it loads the weights,
and neither optimizer nor progress.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_hdp.megatron.checkpoint import checksums
from megatron_hdp.megatron.checkpoint.checksums import FileSum
from megatron_hdp.megatron.checkpoint.folder import RELEASE, TRACKER
from megatron_hdp.megatron.checkpoint.reading import read_common
from megatron_hdp.megatron.options import TrainingArguments

ARGUMENTS = "arguments"
"""Where `state.TrainingState` keeps the options of a run."""
_OURS = "megatron_hdp"
_COMMON = "common.pt"  # of releases before 0.19, read by all
_VERSION = 3.0  # of the order of queries, keys and values: that of today


def state_key(key: str, place: Sequence[int], of: Sequence[int]) -> str:
    """Under which Megatron looks for the state that a module keeps besides its weights.

    Args:
        key: of the module.
        place: numbers of its layer and expert, as far as its tensors have such dimensions.
        of: how many there are.
    """
    shape, offset = (tuple(of), tuple(place)) if of else ((1,), (0,))
    return str(ShardedObject(f"{key}._extra_state", None, shape, offset).unique_key)


def write_common(folder: Path, flags: Mapping[str, Any]) -> None:
    """Writes what all ranks hold: the model's flags, too, which `--use-checkpoint-args` takes."""
    common = {
        "args": argparse.Namespace(**flags, ckpt_format="torch_dist"),
        "checkpoint_version": _VERSION,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
    }
    content = io.BytesIO()  # given a path, torch hides what the disk says
    torch.save(common, content)
    (folder / _COMMON).write_bytes(content.getvalue())
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def finish(folder: Path, sums: Mapping[str, FileSum]) -> None:
    """Writes checksums into a checkpoint that has all of its files, and the tracker beside it."""
    assert folder.name == RELEASE, folder
    checksums.merge(folder, [dict(sums)])
    (folder.parent / TRACKER).write_text(RELEASE)


def flags_of(folder: Path) -> dict[str, Any]:
    """The flags of the run that saved a checkpoint, by Megatron's names; empty if it kept none.

    Raises:
        ValueError: the checkpoint is damaged.
    """
    common = read_common(folder)
    if "args" in common:  # Megatron-LM's, or `write_common`'s
        return dict(vars(common["args"]))
    found: dict[str, Any] = common.get(_OURS, {}).get(ARGUMENTS, {})
    return found


def record_of(arguments: TrainingArguments) -> dict[str, Any]:
    """The options of a run, of numbers and texts alone."""
    kept = (bool, int, float, str)
    return {name: value for name, value in asdict(arguments).items() if isinstance(value, kept)}
