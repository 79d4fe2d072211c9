"""Several ranks on one machine, on one GPU where there is one: for tests and benchmarks only."""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

_TIMEOUT_S = 60


def one_gpu_environment(rank: int) -> dict[str, str]:
    """Return what makes NCCL accept several ranks on one GPU; set it before the first communicator.

    NCCL refuses two ranks on one GPU of one host. Ranks that say they are on different hosts talk
    over sockets, slowly and rightly.
    """
    return {
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_RAS_ENABLE": "0",
        "NCCL_MAX_CTAS": "2",
    }


def new_group_of_all(device_type: str) -> Any:
    """A communicator of all ranks: NCCL's on one shared GPU, or gloo's."""
    import torch
    import torch.distributed as dist

    from megatron_hdp.runtime.ring import new_ring_group

    timeout, everyone = timedelta(seconds=_TIMEOUT_S), [list(range(dist.get_world_size()))]
    if device_type == "cpu":
        return new_ring_group(everyone, timeout)
    os.environ.update(one_gpu_environment(dist.get_rank()))
    torch.cuda.set_device(0)
    return new_ring_group(everyone, timeout, torch.device("cuda", 0), backend="nccl")


def run(num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
    """Calls an importable ``function(*args)`` on gloo ranks in new processes; results by rank.

    The processes are spawned: one that is forked from where CUDA was looked at cannot use it.

    Raises:
        RuntimeError: a rank failed, with its traceback, or the deadline passed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(num_ranks):
            pipe, child_pipe = context.Pipe()
            arguments = (rank, num_ranks, Path(folder, "rendezvous"), child_pipe, function, args)
            processes.append(context.Process(target=_rank_main, args=arguments, daemon=True))
            processes[-1].start()
            child_pipe.close()
            pipes.append(pipe)
        try:
            return _answers(pipes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answers(pipes: list[Any], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    answers: dict[int, Any] = {}
    while len(answers) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}
        ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"no answer from ranks {[*waiting.values()]} in {timeout_s:.0f} s")
        for pipe in ready:
            rank = waiting[pipe]
            try:
                failed, answers[rank] = pipe.recv()
            except EOFError as error:
                raise RuntimeError(f"rank {rank} died before it answered") from error
            if failed:
                raise RuntimeError(f"rank {rank} failed: {answers[rank]}")
    return [answers[rank] for rank in range(len(pipes))]


def _rank_main(
    rank: int,
    num_ranks: int,
    rendezvous: Path,
    pipe: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            "gloo",
            init_method=rendezvous.as_uri(),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=_TIMEOUT_S),
        )
        pipe.send((False, function(*args)))
    except Exception:  # whatever it was, the parent reports it
        pipe.send((True, traceback.format_exc()))
    pipe.poll(_TIMEOUT_S)  # leave when the parent has all results: connections stay open till then
