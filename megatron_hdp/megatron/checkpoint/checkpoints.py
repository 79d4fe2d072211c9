"""Checkpoints of a run through megatron-core's dist_checkpointing: what they hold, load and save.

Held: weights, optimizer, learning-rate schedule, how far training has come, and what decides the
order of the data. Nothing is held per rank, so a run continues on another number of ranks. Dropout
under HDP is a function of seed, data position and rank, made anew at every step, so no state of a
random generator is held; a run without HDP keeps Megatron's generators (`rng_state`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint import CheckpointException

from megatron_hdp.data import DataOrder
from megatron_hdp.megatron.checkpoint import rng_state, write_results
from megatron_hdp.megatron.checkpoint.folder import CheckpointFolder
from megatron_hdp.megatron.optimizer import laid_out, settings, torch_adam
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.parallel import compute_device
from megatron_hdp.megatron.releases import own_checkpoint_writer
from megatron_hdp.processes import bound_to_this_process

_POLL_S = 0.05
_VERSION = 1
_OURS = "megatron_hdp"  # the entry of a checkpoint that is not Megatron's


@dataclass(frozen=True)
class Progress:
    """How far training has come; the same on every rank."""

    iteration: int = 0
    consumed_sequences: int = 0
    consumed_tokens: int = 0


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint restores."""

    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


class Checkpoints:
    """Loads and saves the checkpoints of one run; every rank must make the same calls.

    Args:
        arguments: where to load from and save to, and how.
        state: what is saved and restored.
        order: what decides the order of the data.
        say: prints one line.
    """

    def __init__(
        self,
        arguments: TrainingArguments,
        state: TrainingState,
        order: DataOrder,
        say: Callable[[str], None],
    ) -> None:
        self._arguments = arguments
        self._state = state
        self._order = order
        self._say = say
        self._folder = None if arguments.save is None else CheckpointFolder(arguments.save)
        self._latest = 0  # iteration that was saved or loaded last
        # Megatron's writer for a single save forks this process, which suits the CPU; the one that
        # it keeps for all saves wants a GPU, and with CUDA nothing should fork.
        self._queue = AsyncCallsQueue(persistent=compute_device().type == "cuda")

    def load(self) -> Progress:
        """Restores the checkpoint that the arguments name; training starts anew if there is none.

        Raises:
            ValueError: there is a checkpoint, but this run cannot continue it; says why.
        """
        arguments = self._arguments
        for path, weights_only in (
            (arguments.load, arguments.finetune),
            (arguments.pretrained_checkpoint, True),
        ):
            if path is None:
                continue
            found = _on_first_rank(partial(self._find, path))
            if found is None:
                self._say(f"no checkpoint in {path} yet")
                continue
            _require_shared(found, "--load")
            with _misfits_explained(found):
                progress = self._load_weights(found) if weights_only else self._resume(found)
            self._say(f"loaded {'the weights of ' if weights_only else ''}{found}: {progress}")
            return progress
        return Progress()

    def save(self, progress: Progress) -> None:
        """Saves, unless this very state is saved already; asynchronously with ``--async-save``.

        What is being saved asynchronously is finished first.

        Raises:
            ValueError: the folder cannot be written, or ranks do not share it.
        """
        if self._folder is None or progress.iteration == self._latest:
            return
        self.wait()
        folder, iteration = self._folder, progress.iteration
        written = _on_first_rank(partial(folder.begin, iteration))
        _require_shared(written, "--save")
        strategy = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy(),
            parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        results = write_results.ResultsFile(written / f"results-{dist.get_rank()}")
        with write_results.through(results):
            request = dist_checkpointing.save(
                self._content(progress),
                str(written),
                strategy,
                async_sharded_save=True,
                **own_checkpoint_writer(),
            )
        request.add_finalize_fn(partial(self._publish, folder, written, iteration))
        self._latest = iteration
        # a writer waits until its rank has heard of its end; if that was killed, for ever
        with bound_to_this_process():
            if self._arguments.async_save:
                self._queue.schedule_async_request(request)
            else:
                request.execute_sync()

    def poll(self) -> None:
        """Makes an asynchronously saved checkpoint visible once every rank has written its part."""
        self._queue.maybe_finalize_async_calls()

    def wait(self) -> None:
        """Returns when nothing is being saved any more."""
        while self._queue.get_num_unfinalized_calls():
            self.poll()  # an all-reduce each time, so no rank waits for another one's disk in one
            time.sleep(_POLL_S)

    def finish(self) -> None:
        """`wait`, then ends the helpers of asynchronous saving."""
        self.wait()
        self._queue.close()

    def _publish(self, folder: CheckpointFolder, written: Path, iteration: int) -> None:
        _on_first_rank(partial(folder.publish, written, iteration))
        self._say(f"saved checkpoint of iteration {iteration} to {folder.path}")

    def _find(self, path: Path) -> Path | None:
        folder, iteration = CheckpointFolder(path), self._arguments.ckpt_step
        if iteration is None or path != self._arguments.load:
            iteration = folder.latest()
        return None if iteration is None else folder.find(iteration)

    def _content(self, progress: Progress) -> dict[str, Any]:
        content = self._sharded_state(is_loading=False)
        content["scheduler"] = self._state.scheduler.state_dict()
        content[_OURS] = {
            "version": _VERSION,
            "progress": asdict(progress),
            "order": asdict(self._order),
            "epoch": progress.consumed_sequences // self._order.num_sequences,
            "optimizer": self._optimizer_kind(),
        }
        if not self._order.hybrid_data_parallel:
            content["rng_state"] = rng_state.sharded()
        return content

    def _load_weights(self, source: Path) -> Progress:
        state = dist_checkpointing.load({"model": self._sharded_weights()}, str(source))
        self._state.model.module.load_state_dict(state["model"])
        self._state.optimizer.reload_model_params()
        return Progress()

    def _resume(self, source: Path) -> Progress:
        arguments = self._arguments
        common = dist_checkpointing.load_common_state_dict(str(source))
        ours = _require_ours(common, source)
        self._order.require_same(DataOrder(**ours["order"]), str(source))
        self._require_same_schedule(common["scheduler"], source)
        progress = Progress(**ours["progress"])
        content = {"model": self._sharded_weights()}
        with ExitStack() as stack:
            if arguments.load_optim:
                self._require_same_optimizer(ours["optimizer"], source)
                stack.enter_context(torch_adam.restorable(self._state.optimizer))
                content = self._sharded_state(is_loading=True)
            if arguments.load_rng and not self._order.hybrid_data_parallel:
                content["rng_state"] = rng_state.sharded()
            content = dist_checkpointing.load(content, str(source))
            self._state.model.module.load_state_dict(content["model"])
            if arguments.load_optim:
                state = laid_out(content["optimizer"], common["optimizer"], self._state.optimizer)
                self._use_own_settings(state)
                self._state.optimizer.load_state_dict(state)
            else:
                self._state.optimizer.reload_model_params()
        self._state.scheduler.load_state_dict(common["scheduler"])
        if "rng_state" in content:
            rng_state.restore(content["rng_state"])
        if arguments.save is not None and arguments.save.resolve() == source.parent.resolve():
            self._latest = progress.iteration
        return progress

    def _use_own_settings(self, state: dict[Any, Any]) -> None:
        """Puts this command's flags in place of the settings that the optimizer's `state` holds.

        Before it is loaded: from 0.19 on Megatron tells groups of parameters apart by them.
        """
        arguments = self._arguments
        for group in settings(state):
            group["max_lr"], group["min_lr"] = arguments.lr, arguments.min_lr
            group["betas"] = (arguments.adam_beta1, arguments.adam_beta2)
            group["eps"] = arguments.adam_eps

    def _require_same_schedule(self, saved: dict[str, Any], source: Path) -> None:
        """Refuses what Megatron's scheduler would only assert."""
        if self._arguments.override_opt_param_scheduler:
            return
        mine = self._state.scheduler.state_dict()
        flags = {
            "max_lr": "--lr",
            "min_lr": "--min-lr",
            "lr_warmup_steps": "--lr-warmup-iters",
            "lr_decay_steps": "--lr-decay-iters (default: --train-iters)",
            "lr_decay_style": "--lr-decay-style",
            "start_wd": "--weight-decay",
        }
        differences = [
            f"{flag}: found {mine[key]}, expected {saved[key]}"
            for key, flag in flags.items()
            if mine[key] != saved[key]
        ]
        if differences:
            raise ValueError(
                f"{source} was saved under another schedule: {'; '.join(differences)}. Give those, "
                "or add --override-opt-param-scheduler to continue under the new one"
            )

    def _optimizer_kind(self) -> dict[str, Any]:
        arguments = self._arguments
        precision = "bf16" if arguments.bf16 else "fp64" if arguments.fp64 else "fp32"
        return {"distributed": arguments.use_distributed_optimizer, "precision": precision}

    def _require_same_optimizer(self, saved: dict[str, Any], source: Path) -> None:
        mine = self._optimizer_kind()
        if mine != saved:
            raise ValueError(
                f"{source} holds the state of another kind of optimizer: found {mine}, expected "
                f"{saved} (--use-distributed-optimizer, --bf16): give the flags it was saved with, "
                "or add --no-load-optim to continue with fresh optimizer state"
            )

    def _sharded_weights(self) -> dict[str, Any]:
        return dict(self._state.model.module.sharded_state_dict(metadata=_metadata()))

    def _sharded_state(self, *, is_loading: bool) -> dict[str, Any]:
        weights = self._sharded_weights()
        optimizer = self._state.optimizer.sharded_state_dict(
            weights, is_loading=is_loading, metadata=_metadata()
        )
        return {"model": weights, "optimizer": optimizer}


def _metadata() -> dict[str, Any]:
    """How Megatron lays a checkpoint out: by parameter, so that any other layout can load it."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _require_ours(common: dict[str, Any], source: Path) -> dict[str, Any]:
    ours: dict[str, Any] = common.get(_OURS, {})
    if ours.get("version") != _VERSION:
        raise ValueError(
            f"{source} holds no data state of version {_VERSION} (found {ours.get('version')}), so "
            "where to continue is unknown: add --finetune to start at step 0 from its weights alone"
        )
    return ours


@contextmanager
def _misfits_explained(source: Path) -> Iterator[None]:
    """Turns Megatron's complaint that a checkpoint is of another model into the user's error."""
    try:
        yield
    except CheckpointException as error:
        reasons = [failure for failure, _ in error.failures.values()]
        misfits = [reason for reason in reasons if isinstance(reason, CheckpointingException)]
        if not misfits:
            raise
        raise ValueError(
            f"{source} does not fit this model, give the flags of the one that was saved: "
            f"{misfits[0]}"
        ) from error


def _on_first_rank(action: Callable[[], Any]) -> Any:
    """Calls `action` on the first rank; every rank gets what it returned or raised.

    Raises:
        ValueError: the first rank met a ValueError, or an error of the file system.
    """
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = action()
        except ValueError as error:
            answer[1] = str(error)
        except OSError as error:
            answer[1] = f"{error}: --save needs a folder to write into, --load one to read"
    dist.broadcast_object_list(answer, src=0, device=compute_device())
    if answer[1] is not None:
        raise ValueError(answer[1])
    return answer[0]


def _require_shared(folder: Path, flag: str) -> None:
    """Raises on every rank if a rank does not see the folder that the first rank sees."""
    missing = torch.tensor([not folder.is_dir()], dtype=torch.int, device=compute_device())
    dist.all_reduce(missing)
    if missing.item():
        raise ValueError(
            f"{missing.item()} of {dist.get_world_size()} ranks do not see {folder}: give {flag} a "
            "folder on storage that all ranks share"
        )
