"""Checkpoints through megatron-core's dist_checkpointing, visible only once they are whole."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_hdp.megatron import torch_adam

_TRACKER = "latest_checkpointed_iteration.txt"  # Megatron's name


@dataclass(frozen=True)
class Progress:
    """How far training has come; the same on every rank."""

    iteration: int = 0
    consumed_sequences: int = 0


def save_checkpoint(
    folder: Path,
    progress: Progress,
    model: DistributedDataParallel,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> None:
    """Writes ``folder/iter_NNNNNNN`` and then names it the latest; every rank must call this.

    The files are written under another name and renamed when all ranks are done, so a kill at any
    moment leaves the previous checkpoint as it was.
    """
    final = _iteration_folder(folder, progress.iteration)
    partial = final.with_name(final.name + ".partial")
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state = _sharded_state(model, optimizer, scheduler, is_loading=False)
    state["progress"] = asdict(progress)
    dist_checkpointing.save(state, str(partial))
    dist.barrier()
    if first:
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        tracker = folder / (_TRACKER + ".partial")
        tracker.write_text(str(progress.iteration))
        os.replace(tracker, folder / _TRACKER)
    dist.barrier()


def load_checkpoint(
    folder: Path,
    model: DistributedDataParallel,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> Progress | None:
    """Restores the latest checkpoint of `folder`; None where there is none yet.

    Raises:
        ValueError: the folder names a checkpoint that it does not hold.
    """
    tracker = folder / _TRACKER
    if not tracker.exists():
        return None
    source = _iteration_folder(folder, int(tracker.read_text()))
    if not source.is_dir():
        raise ValueError(
            f"{tracker} names {source.name}, which is not there: put it back or write the number "
            "of another checkpoint of this folder into the file"
        )
    with torch_adam.restorable(optimizer):
        state = _sharded_state(model, optimizer, scheduler, is_loading=True)
        state = dist_checkpointing.load(state, str(source))
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    return Progress(**state["progress"])


def _iteration_folder(folder: Path, iteration: int) -> Path:
    return folder / f"iter_{iteration:07d}"


def _sharded_state(
    model: DistributedDataParallel,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    *,
    is_loading: bool,
) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    weights = model.module.sharded_state_dict(metadata=metadata)
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(
            weights, is_loading=is_loading, metadata=metadata
        ),
        "scheduler": scheduler.state_dict(),
    }
