"""Starts torch.distributed, Megatron's parallel state and the rings' communicator beside it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.distributed import distributed_c10d

from megatron_hdp.megatron.cpu import gpu_gaps, shim
from megatron_hdp.megatron.options import (
    TrainingArguments,
    expert_domain_size,
    num_model_chunks,
    token_multiple,
)
from megatron_hdp.planner.network import Nccl
from megatron_hdp.runtime.gathering import gathered
from megatron_hdp.runtime.health import restart_meetings, store_of_attempt
from megatron_hdp.runtime.ring import RingComm, new_ring_group, running_nccl
from megatron_hdp.runtime.timeline import Timeline

_NCCL_MARGIN_MINUTES = 2
_NUMBERS = ("RANK", "WORLD_SIZE", "MASTER_PORT")
_PLACE = (*_NUMBERS, "MASTER_ADDR")


def compute_device() -> torch.device:
    """This rank's GPU, or the CPU where there is none."""
    if shim.needed():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def join_job(arguments: TrainingArguments) -> None:
    """Joins the job that torchrun started, or started again; `leave_job` undoes it.

    Raises:
        ValueError: the environment names no place in a job; the job's store cannot be reached; a
            rank does not come; there is no GPU for this rank, or none can do what is asked for.
    """
    _require_place()
    _take_gpu(arguments)
    minutes = communication_minutes(arguments)
    timeout = timedelta(minutes=minutes)
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        store = store_of_attempt(store, rank, world_size)
    except dist.DistError as error:
        words = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ValueError(
            f"ranks do not find together at MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT="
            f"{os.environ['MASTER_PORT']}: {words}. Expected that rank 0 can listen "
            "there, on a port that is free, and that all WORLD_SIZE="
            f"{os.environ['WORLD_SIZE']} ranks come within {minutes} minutes "
            "(--distributed-timeout-minutes)"
        ) from error
    enter_job(arguments, JobPlace(store, rank, world_size))


@dataclass(frozen=True)
class JobPlace:
    """Where a process stands in a job."""

    store: dist.Store
    """In which only these ranks find each other."""
    rank: int
    world_size: int


def enter_job(arguments: TrainingArguments, place: JobPlace) -> None:
    """Makes torch.distributed's default group; `leave_job` undoes it.

    Raises:
        ValueError: there is no GPU for this rank, or none can do what is asked for.
    """
    _take_gpu(arguments)
    restart_meetings()
    # it names groups, in which all must agree, and counts one that could not be made, too
    distributed_c10d._world.group_count = 0
    dist.init_process_group(
        backend=_backend(arguments.distributed_backend, compute_device()),
        store=place.store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(minutes=communication_minutes(arguments)),
    )


def _require_place() -> None:
    """Refuses an environment that does not say where this process stands in a job."""
    found = {name: os.environ.get(name) for name in _PLACE}
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise ValueError(
            f"found no {', '.join(missing)} in the environment, which say where a rank stands in "
            "its job: start it by torchrun, for example\n  torchrun --nproc-per-node 4 -m "
            "megatron_hdp.pretrain_gpt ..."
        )
    numbers = [found[name] or "" for name in _NUMBERS]
    if not all(number.isdecimal() for number in numbers) or int(numbers[0]) >= int(numbers[1]):
        raise ValueError(
            f"found {', '.join(f'{name}={found[name]}' for name in _NUMBERS)} in the environment, "
            "expected numbers with RANK < WORLD_SIZE, as torchrun sets them"
        )


def communication_minutes(arguments: TrainingArguments) -> int:
    """How long a communicator waits for a rank.

    gloo then raises, and the heartbeats say whose fault it is. NCCL ends the process, so they, who
    wait as long as the flag says, must come first.
    """
    minutes = arguments.distributed_timeout_minutes
    uses_nccl = _backend(arguments.distributed_backend, compute_device()) == "nccl"
    return minutes + _NCCL_MARGIN_MINUTES if uses_nccl else minutes


def _take_gpu(arguments: TrainingArguments) -> None:
    """Makes this rank's GPU, if there are some, the one that all that names none runs on."""
    device = compute_device()
    if device.type == "cuda":
        _require_gpu(device, arguments)
        torch.cuda.set_device(device)


def _require_gpu(device: torch.device, arguments: TrainingArguments) -> None:
    if device.index >= torch.cuda.device_count():
        raise ValueError(
            f"rank {device.index} of this machine (LOCAL_RANK) has no GPU: found "
            f"{torch.cuda.device_count()}, and each rank needs its own: lower --nproc-per-node"
        )
    if arguments.fp64:
        raise ValueError(
            "--fp64 trains on CPUs, Megatron's optimizers take no float64 on a GPU: leave it out, "
            "or hide the GPUs with CUDA_VISIBLE_DEVICES=''"
        )


def leave_job() -> None:
    """Closes every communicator."""
    dist.destroy_process_group()


def initialise(arguments: TrainingArguments) -> None:
    """Makes Megatron's groups in a joined job, with context_parallel_size = 1; `finish` undoes it.

    On a machine without a GPU the CPU shim is applied first. Every blocking call of the groups made
    here ends after ``--distributed-timeout-minutes`` with an error.

    Raises:
        ValueError: the ranks cannot be cut into model replicas or EP groups.
    """
    world, tensor_ranks = dist.get_world_size(), arguments.tensor_model_parallel_size
    stages = arguments.pipeline_model_parallel_size
    if world % (tensor_ranks * stages):
        raise ValueError(
            f"{world} ranks cannot be cut into model replicas of {tensor_ranks} tensor-parallel x "
            f"{stages} pipeline ranks: change --nproc-per-node, --tensor-model-parallel-size or "
            "--pipeline-model-parallel-size"
        )
    expert_ranks = arguments.expert_model_parallel_size
    expert_tensor_ranks = arguments.expert_tensor_parallel_size
    if world // stages % (expert_ranks * expert_tensor_ranks):
        raise ValueError(
            f"{world // stages} ranks of a pipeline stage cannot be cut into groups of "
            f"{expert_ranks * expert_tensor_ranks} that share the experts "
            f"(--expert-model-parallel-size {expert_ranks} x --expert-tensor-parallel-size "
            f"{expert_tensor_ranks}): change one of the numbers"
        )
    if shim.needed():
        shim.apply()
    else:
        gpu_gaps.fill()
    chunks = num_model_chunks(arguments)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_ranks,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        expert_model_parallel_size=expert_ranks,
        expert_tensor_parallel_size=expert_tensor_ranks,
        distributed_timeout_minutes=communication_minutes(arguments),
    )


def has_groups(arguments: TrainingArguments) -> bool:
    """Whether Megatron's groups are there, of the layout that arguments name.

    Raises:
        ValueError: they are of another layout.
    """
    if not parallel_state.model_parallel_is_initialized():
        return False
    found = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
    wanted = (
        arguments.tensor_model_parallel_size,
        arguments.pipeline_model_parallel_size,
        arguments.expert_model_parallel_size,
    )
    if found != wanted:
        raise ValueError(
            f"found groups of {found} tensor-parallel, pipeline and expert ranks, expected "
            f"{wanted} as the flags say: models of one job have one layout"
        )
    return True


def finish() -> None:
    """Destroys Megatron's groups and takes the CPU shim off, or what was filled in on a GPU."""
    parallel_state.destroy_model_parallel()
    shim.revert()
    gpu_gaps.revert()


def _backend(wanted: str, device: torch.device) -> str:
    if wanted != "auto":
        return wanted
    return "gloo" if device.type == "cpu" else "nccl"


def set_seeds(seed: int) -> None:
    """Seeds every generator as Megatron does; the same on all ranks of the HDP dimension."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def is_first_rank() -> bool:
    """True on the one rank of the job that prints and writes."""
    return bool(dist.get_rank() == 0)


def say(line: str) -> None:
    """Prints a line of the log, on the first rank."""
    if is_first_rank():
        print(line, flush=True)


def hdp_rank() -> int:
    """This rank's place in the HDP dimension (Megatron's data-parallel rank)."""
    return int(parallel_state.get_data_parallel_rank())


def num_hdp_ranks() -> int:
    """HDP ranks of the job."""
    return int(parallel_state.get_data_parallel_world_size())


def hdp_group() -> tuple[dist.ProcessGroup, list[int]]:
    """The group over which gradients and the optimizer's state are spread, and its ranks."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group, dist.get_process_group_ranks(group)


def is_spread_expert(parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter belongs to experts that are spread over ranks: Megatron's mark."""
    return not getattr(parameter, "allreduce", True)


def sum_over_hdp_ranks(tensor: torch.Tensor) -> None:
    """Adds up a tensor over the HDP ranks, in place, where gradients are added up, too."""
    dist.all_reduce(
        tensor, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
    )


@dataclass(frozen=True)
class RankPlace:
    """Where this rank stands in the HDP dimension, in its pipeline and among tensor ranks."""

    hdp_rank: int
    num_hdp_ranks: int
    stage: int
    num_stages: int
    tensor_rank: int
    num_tensor_ranks: int
    lockstep_ranks: int
    """Consecutive HDP ranks that enter each other's communication in every layer."""
    token_multiple: int
    """A micro-batch's tokens must be a multiple of this, see `options.token_multiple`."""
    num_model_chunks: int = 1
    """Parts of the model on this rank: chunk ``c`` is stage ``c num_stages + stage`` of all."""

    @property
    def is_first_stage(self) -> bool:
        """True where tokens enter the model."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """True where the loss is computed."""
        return self.stage == self.num_stages - 1

    @property
    def reads_tokens(self) -> bool:
        """True where token files are read; other tensor ranks receive, other stages need none."""
        return self.tensor_rank == 0 and (self.is_first_stage or self.is_last_stage)


def rank_place(arguments: TrainingArguments, config: Any = None) -> RankPlace:
    """This rank's place, once `initialise` has run, with a model of this configuration."""
    num_tensor_ranks = parallel_state.get_tensor_model_parallel_world_size()
    return RankPlace(
        hdp_rank=hdp_rank(),
        num_hdp_ranks=num_hdp_ranks(),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        num_stages=parallel_state.get_pipeline_model_parallel_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        num_tensor_ranks=num_tensor_ranks,
        lockstep_ranks=expert_domain_size(arguments),
        token_multiple=token_multiple(config or arguments),
        num_model_chunks=num_model_chunks(arguments),
    )


def new_ring_comm(arguments: TrainingArguments, timeline: Timeline) -> RingComm:
    """The rings' communicator of this rank's HDP group; every rank of the job must call this."""
    group = parallel_state.get_data_parallel_group()
    return RingComm(_another(group, arguments, arguments.hdp_ring_max_ctas, say), timeline)


def nccl_of_rings(arguments: TrainingArguments) -> Nccl | None:
    """What sends around rings; None where that is not NCCL, or nobody knows how it does."""
    if _backend(arguments.distributed_backend, compute_device()) != "nccl":
        return None
    return running_nccl(arguments.hdp_ring_max_ctas)


def new_gradient_group(arguments: TrainingArguments) -> dist.ProcessGroup:
    """One more communicator of this rank's pipeline; every rank of the job must call this."""
    return _another(parallel_state.get_pipeline_model_parallel_group(), arguments, 0, None)


_OF_ROWS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def rows_group(arguments: TrainingArguments) -> dist.ProcessGroup:
    """The communicator of all ranks for rows of items; the job's first call makes it.

    Every rank of the job must make that one. All pairs talk to each other there: NCCL connects two
    ranks when they first do and blocks both, which must not happen in the middle of a step.
    """
    job = dist.group.WORLD
    assert job is not None, "the job is there"
    if job not in _OF_ROWS:
        timeout = timedelta(minutes=communication_minutes(arguments))
        found = _OF_ROWS[job] = dist.new_group(timeout=timeout)
        token = torch.zeros(dist.get_world_size(), device=compute_device())
        dist.all_to_all_single(torch.empty_like(token), token, group=found)
    return _OF_ROWS[job]


def _another(
    group: dist.ProcessGroup,
    arguments: TrainingArguments,
    max_ctas: int,
    tell: Callable[[str], None] | None,
) -> dist.ProcessGroup:
    """A communicator beside `group`, whose neighbours talk to each other in a circle."""
    mine = _members(dist.get_process_group_ranks(group))
    unique = sorted(set(gathered(mine)), key=lambda ranks: ranks[0])
    timeout = timedelta(minutes=communication_minutes(arguments))
    return new_ring_group(unique, timeout, compute_device(), max_ctas, tell=tell)


def _members(ranks: Sequence[int]) -> Sequence[int]:
    """The same ranks, as a range where they are one, as Megatron's groups are.

    Then what every rank tells all others does not grow with the group: lists would take 805 MB on
    each of 16,384 ranks.
    """
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    regular = range(ranks[0], ranks[-1] + 1, step) if step > 0 else ()
    return regular if list(regular) == list(ranks) else tuple(ranks)
