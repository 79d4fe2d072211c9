"""What a checkpoint holds of a run, how it is put back, and which runs may not continue it.

Held: weights, optimizer, learning-rate schedule, how far training has come, and what decides the
order of the data. Nothing is held per rank but what was learnt of its speed, which other ranks drop
(`step.learning`), so a run continues on another number of ranks. Dropout under HDP is a function of
seed, data position and rank, made anew at every step, so no state of a random generator is held; a
run without HDP keeps Megatron's generators (`rng_state`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_hdp.data import Continuation, DataOrder
from megatron_hdp.data.mixture import Position, position_of_run
from megatron_hdp.megatron.adapters import adapter_record, require_same_adapters
from megatron_hdp.megatron.checkpoint import reading, rng_state
from megatron_hdp.megatron.checkpoint.released import ARGUMENTS, record_of
from megatron_hdp.megatron.checkpoint.weights import (
    ADAPTERS,
    OURS,
    layout_metadata,
    put_weights,
    read_weights,
    sharded_weights,
)
from megatron_hdp.megatron.optimizer import laid_out, settings, torch_adam
from megatron_hdp.megatron.options import TrainingArguments, other_positions, position_record

_VERSION = 1


@dataclass(frozen=True)
class Progress:
    """How far training has come; the same on every rank."""

    iteration: int = 0
    position: Position = Position()
    """Where in the data the next step begins."""
    consumed_tokens: int = 0
    """Tokens trained on; corrupt documents are drawn and not counted here."""

    def __str__(self) -> str:
        return (
            f"iteration {self.iteration:,}, {self.position.sequences:,} sequences, "
            f"{self.consumed_tokens:,} tokens"
        )


class TrainingState:
    """What a checkpoint restores; once resumed, the data's order is in the checkpoint's version."""

    def __init__(
        self,
        arguments: TrainingArguments,
        order: DataOrder,
        chunks: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
    ) -> None:
        self._arguments = arguments
        self.order = order
        self.announcements: list[str] = []
        """What the log says of what was loaded: how the data goes on, and what is changed."""
        self.chunks = chunks
        self.optimizer = optimizer
        self.scheduler = scheduler

    def content(self, progress: Progress) -> dict[str, Any]:
        """All of it, as Megatron saves it."""
        content = self._sharded_state(is_loading=False)
        content["scheduler"] = self.scheduler.state_dict()
        content[OURS] = {
            "version": _VERSION,
            "progress": {
                "iteration": progress.iteration,
                "consumed_sequences": progress.position.sequences,
                "consumed_tokens": progress.consumed_tokens,
            },
            "position": progress.position.to_record(),
            "order": self.order.to_record(),
            "optimizer": self._optimizer_kind(),
            "positions": position_record(self._arguments),
            ARGUMENTS: record_of(self._arguments),
            ADAPTERS: adapter_record(self._arguments),
        }
        if not self.order.hybrid_data_parallel:
            content["rng_state"] = rng_state.sharded()
        return content

    def load_weights(self, source: Path) -> None:
        """Restores the weights alone.

        Raises:
            ValueError: the checkpoint is damaged, or of another model.
        """
        saved = reading.read_common(source).get(OURS, {})
        require_same_adapters(None, saved.get(ADAPTERS), source)
        read_weights(self.chunks, source)
        self.announcements = other_positions(self._arguments, saved.get("positions", {}))
        self.optimizer.reload_model_params()

    def resume(self, source: Path) -> Progress:
        """Restores all that the arguments do not leave out; returns how far training had come.

        Raises:
            ValueError: the checkpoint is damaged, or this run cannot continue it; says why.
        """
        arguments = self._arguments
        common = reading.read_common(source)
        adapters = adapter_record(arguments)
        require_same_adapters(adapters, common.get(OURS, {}).get(ADAPTERS), source)
        ours = _require_ours(common, source)
        goes_on = self.order.continuing(DataOrder.from_record(ours["order"]), str(source))
        self._require_same_schedule(common["scheduler"], source)
        progress = _progress_of(ours, goes_on)
        content = self._weights()
        with ExitStack() as stack:
            if arguments.load_optim:
                self._require_same_optimizer(ours["optimizer"], source)
                stack.enter_context(torch_adam.restorable(self.optimizer))
                content = self._sharded_state(is_loading=True)
            if arguments.load_rng and not self.order.hybrid_data_parallel:
                content["rng_state"] = rng_state.sharded()
            content = reading.read(content, source)
            put_weights(self.chunks, content, of_adapters=adapters is not None)
            if arguments.load_optim:
                state = laid_out(content["optimizer"], common["optimizer"], self.optimizer)
                self._use_own_settings(state)
                self.optimizer.load_state_dict(state)
            else:
                self.optimizer.reload_model_params()
        self.scheduler.load_state_dict(common["scheduler"])
        if "rng_state" in content:
            rng_state.restore(content["rng_state"])
        self.order = goes_on.order
        others = other_positions(arguments, ours.get("positions", {}))
        self.announcements = goes_on.announcements() + others
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
        mine = self.scheduler.state_dict()
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
                f"{source} was saved with another learning rate schedule: "
                f"{'; '.join(differences)}. Give its flags, or add --override-opt-param-scheduler "
                "to resume with the new one"
            )

    def _optimizer_kind(self) -> dict[str, Any]:
        arguments = self._arguments
        precision = "bf16" if arguments.bf16 else "fp64" if arguments.fp64 else "fp32"
        return {"distributed": arguments.use_distributed_optimizer, "precision": precision}

    def _require_same_optimizer(self, saved: dict[str, Any], source: Path) -> None:
        mine = self._optimizer_kind()
        if mine != saved:
            raise ValueError(
                f"{source} contains the state of another kind of optimizer: found {mine}, expected "
                f"{saved} (--use-distributed-optimizer, --bf16): give the flags it was saved with, "
                "or add --no-load-optim to resume with fresh optimizer state"
            )

    def _weights(self) -> dict[str, Any]:
        """What a checkpoint holds of the model: adapters alone, where there are some."""
        return sharded_weights(self.chunks, of_adapters=self._arguments.lora_rank is not None)

    def _sharded_state(self, *, is_loading: bool) -> dict[str, Any]:
        weights = self._weights()
        optimizer = self.optimizer.sharded_state_dict(
            weights, is_loading=is_loading, metadata=layout_metadata()
        )
        return {**weights, "optimizer": optimizer}


def _progress_of(ours: dict[str, Any], goes_on: Continuation) -> Progress:
    """How far training had come; releases before mixtures saved no position."""
    saved = ours["progress"]
    iteration, tokens = saved["iteration"], saved["consumed_tokens"]
    position = position_of_run(
        ours.get("position"), goes_on, iteration, saved["consumed_sequences"], tokens
    )
    return Progress(iteration, position, tokens)


def _require_ours(common: dict[str, Any], source: Path) -> dict[str, Any]:
    ours: dict[str, Any] = common.get(OURS, {})
    if ours.get("version") != _VERSION:
        raise ValueError(
            f"{source} contains no data position of version {_VERSION} (found "
            f"{ours.get('version')}): add --finetune to start at step 0 from its weights alone"
        )
    return ours
