"""Starts torch.distributed, Megatron's parallel state and the rings' communicator beside it."""

from __future__ import annotations

import os
import random
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_hdp.megatron import cpu_shim
from megatron_hdp.megatron.arguments import TrainingArguments
from megatron_hdp.runtime.attempt import store_of_attempt
from megatron_hdp.runtime.ring_comm import RingComm, new_ring_group
from megatron_hdp.runtime.timeline import Timeline


def compute_device() -> torch.device:
    """This rank's GPU, or the CPU where there is none."""
    if cpu_shim.needed():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def join_job(arguments: TrainingArguments) -> None:
    """Joins the job that torchrun started, or started again; `leave_job` undoes it."""
    device = compute_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(minutes=arguments.distributed_timeout_minutes)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    dist.init_process_group(
        backend=_backend(arguments.distributed_backend, device),
        store=store_of_attempt(store, rank, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


def leave_job() -> None:
    """Closes every communicator."""
    dist.destroy_process_group()


def initialise(arguments: TrainingArguments) -> None:
    """Makes Megatron's groups in a joined job, with context_parallel_size = 1; `finish` undoes it.

    On a machine without a GPU the CPU shim is applied first. Every blocking call of the groups made
    here ends after ``--distributed-timeout-minutes`` with an error.

    Raises:
        ValueError: the number of ranks is not a multiple of the tensor-parallel size.
    """
    world, tensor_ranks = dist.get_world_size(), arguments.tensor_model_parallel_size
    if world % tensor_ranks:
        raise ValueError(
            f"{world} ranks cannot be cut into tensor-parallel groups of {tensor_ranks}: change "
            "--nproc-per-node or --tensor-model-parallel-size"
        )
    if cpu_shim.needed():
        cpu_shim.apply()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_ranks,
        distributed_timeout_minutes=arguments.distributed_timeout_minutes,
    )


def finish() -> None:
    """Destroys Megatron's groups and takes the CPU shim off."""
    parallel_state.destroy_model_parallel()
    cpu_shim.revert()


def _backend(wanted: str, device: torch.device) -> str:
    if wanted != "auto":
        return wanted
    return "gloo" if device.type == "cpu" else "nccl"


def set_seeds(seed: int) -> None:
    """Seeds every generator as Megatron does; alike on all ranks of the HDP dimension."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def hdp_rank() -> int:
    """This rank's place in the HDP dimension (Megatron's data-parallel rank)."""
    return int(parallel_state.get_data_parallel_rank())


def num_hdp_ranks() -> int:
    """HDP ranks of the job."""
    return int(parallel_state.get_data_parallel_world_size())


def new_ring_comm(timeout_minutes: float, timeline: Timeline) -> RingComm:
    """The rings' communicator of this rank's HDP group; every rank of the job must call this."""
    mine = dist.get_process_group_ranks(parallel_state.get_data_parallel_group())
    rank_lists: list[list[int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(rank_lists, mine)
    unique = sorted({tuple(ranks) for ranks in rank_lists if ranks})
    return RingComm(new_ring_group(unique, timedelta(minutes=timeout_minutes)), timeline)
