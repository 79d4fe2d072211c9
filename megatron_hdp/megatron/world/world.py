"""One object for all that a rank has bound to process groups: left together, made anew together.

Weights, the state of the optimizer and every object that others hold stay: only what they contain
changes. So a rank may leave its job at a step's end, or in the middle of a step that failed, and
enter another one with other members, in the same process.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.execution import HdpExecutor
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.step import build_executor
from megatron_hdp.megatron.world.held_groups import HeldGroups
from megatron_hdp.megatron.world.replicated import CarriedState
from megatron_hdp.megatron.world.wrapping import become, bind, unbind
from megatron_hdp.runtime.epochs import nccl
from megatron_hdp.runtime.timeline import Timeline


class World:
    """What one rank has bound to the groups of its job.

    A distributed optimizer is made anew without its state, which lies on several ranks: see
    `optimizer.ShardCopies`.

    Args:
        arguments: of the run.
        timeline: what the rank does.
        chunks: its parts of the model, each in Megatron's DDP.
        make_optimizer: makes the optimizer over such parts, as it was made at first.

    Attributes:
        optimizer: of the model, if it has one here.

    Raises:
        ValueError: a part of the model holds a group of others: it cannot leave.
    """

    def __init__(
        self,
        arguments: TrainingArguments,
        timeline: Timeline,
        chunks: Sequence[DistributedDataParallel],
        make_optimizer: Callable[[list[Any]], MegatronOptimizer],
    ) -> None:
        self._arguments = arguments
        self._timeline = timeline
        self._chunks = list(chunks)
        self._make_optimizer = make_optimizer
        self._groups: HeldGroups | None = None
        self._carried: CarriedState | None = None
        self.optimizer: MegatronOptimizer | None = None

    def require_movable(self) -> None:
        """Refuses a layout whose ranks cannot leave their job and enter another one by one.

        Raises:
            ValueError: experts lie across HDP ranks.
        """
        arguments = self._arguments
        across = arguments.expert_model_parallel_size * arguments.expert_tensor_parallel_size
        if across > arguments.tensor_model_parallel_size:
            raise ValueError(
                f"found --expert-model-parallel-size {arguments.expert_model_parallel_size} across "
                "HDP ranks, expected experts inside each: a rank that leaves would take experts "
                "with it. Keep it within --tensor-model-parallel-size"
            )

    def leave(self) -> None:
        """Drops everything that is bound to groups, and the groups; waits for no other rank.

        Whoever holds an executor, a loader or a communicator of them must drop it before. What
        `enter` has not finished is dropped, too.

        Raises:
            ValueError: see the class; nothing was changed.
        """
        if self._groups is None:
            self._groups = HeldGroups(self._chunks)
        if self.optimizer is not None and vars(self.optimizer):
            spread = self._arguments.use_distributed_optimizer
            self._carried = CarriedState(self.optimizer, settings_only=spread)
            vars(self.optimizer).clear()
        self._groups.take_out()
        unbind(self._chunks)
        parallel.finish()
        gc.collect()  # a group that anything refers to keeps its connections
        if dist.is_initialized():
            dist.destroy_process_group()
        nccl.give_back(parallel.compute_device())

    def enter(self, place: parallel.JobPlace) -> HdpExecutor:
        """Makes groups, DDP, optimizer and executor for the place in a job.

        Every rank of that job must call this. If it fails, the rank may `leave` and enter another.

        Raises:
            ValueError: the ranks cannot be cut into model replicas.
        """
        assert self._groups is not None, "it has left no job"
        parallel.enter_job(self._arguments, place)
        parallel.initialise(self._arguments)
        self._groups.put_in()
        bind(self._chunks)
        if self.optimizer is not None:
            assert self._carried is not None
            made = self._make_optimizer(self._chunks)
            self._carried.put_into(made)
            become(self.optimizer, made)
        self._groups = self._carried = None
        return build_executor(self._arguments, self._chunks, self._timeline)
