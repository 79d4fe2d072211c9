"""Runs a function on real gloo ranks, so that a failure or a hang names every rank and its stack.

The processes are forked from a server that has imported torch, megatron.core and megatron_hdp
once: starting four ranks takes tenths of a second instead of four imports. Ranks meet in a file,
never on a port.
"""

import faulthandler
import gc
import logging
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

_PRELOAD = [
    "numpy",
    "pytest",
    "torch",
    "torch.distributed",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.tensor_parallel",
    # Half of what a rank of a small test computes would be these.
    "hypothesis",
    "transformers",
    "megatron_hdp.megatron.execution.executor",
    "megatron_hdp.training.loop",
    "tests.gradient_equivalence.faults",
    "tests.support.gradients",
    "tests.support.own_loop",
    "tests.training.runs",
]
_SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    # Importing megatron.core asks whether there is a GPU. If that started CUDA in the server, none
    # of the ranks forked from it could use the GPU.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
_AFTER_FAILURE_S = 5.0  # how long the other ranks may go on once one has failed
_STACKS_S = 3.0  # how long a rank may take to write its stacks

_context = multiprocessing.get_context("forkserver")


class RankError(Exception):
    """At least one rank failed; ``tracebacks`` maps each failing rank to its traceback."""

    def __init__(self, summary: str, tracebacks: dict[int, str]) -> None:
        self.tracebacks = tracebacks
        sections = [f"--- rank {rank} ---\n{text.rstrip()}" for rank, text in tracebacks.items()]
        super().__init__("\n".join([summary, *sections]))


class RankTimeout(RankError):
    """The deadline passed; ``tracebacks`` holds the stacks of every rank's threads."""


@dataclass
class _Rank:
    number: int
    process: ForkServerProcess
    pipe: connection.Connection
    stacks: Path
    result: Any = None
    failure: str | None = None
    finished: bool = False


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 240,
    **kwargs: Any,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on ``num_ranks`` gloo ranks and return their results.

    ``function`` must be importable (module level). It runs with torch.distributed initialised, one
    thread, and RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE set. Arguments and results
    are pickled.

    Raises:
        RankError: a rank raised or died; lists every failing rank, the first one first.
        RankTimeout: a rank was still running after ``timeout_s``; lists every rank's stacks.
    """
    call = pickle.dumps((function, args, kwargs))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks: list[_Rank] = []
        try:
            with _server_environment():
                for number in range(num_ranks):
                    ranks.append(_start(number, num_ranks, Path(folder), call, timeout_s))
            _collect(ranks, timeout_s)
            for rank in ranks:
                rank.pipe.send_bytes(b"leave")
            for rank in ranks:
                rank.process.join(_AFTER_FAILURE_S)
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.join()
                rank.pipe.close()
    return [rank.result for rank in ranks]


@contextmanager
def _server_environment() -> Iterator[None]:
    """Start the server, if none runs yet, in an environment that keeps it single-threaded."""
    with mock.patch.dict(os.environ, _SERVER_ENVIRONMENT):
        _context.set_forkserver_preload(_PRELOAD)
        forkserver.ensure_running()
        yield


def _start(number: int, num_ranks: int, folder: Path, call: bytes, timeout_s: float) -> _Rank:
    pipe, child_pipe = _context.Pipe()
    stacks = folder / f"stacks-{number}"
    process = _context.Process(
        target=_rank_main,
        args=(number, num_ranks, folder / "rendezvous", stacks, child_pipe, call, timeout_s),
        name=f"rank-{number}",  # no daemon: saving a checkpoint starts helpers
    )
    process.start()  # returns once the server has forked, so after its imports
    child_pipe.close()
    return _Rank(number, process, pipe, stacks)


def _collect(ranks: list[_Rank], timeout_s: float) -> None:
    """Wait for every rank's result; raise when one fails or the deadline passes."""
    deadline = time.monotonic() + timeout_s
    failed: list[_Rank] = []
    while waiting := {rank.pipe: rank for rank in ranks if not rank.finished}:
        ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = waiting[pipe]  # type: ignore[index]
            _receive(rank)
            if rank.failure is not None:
                failed.append(rank)
                deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_S)
    if failed:
        names = ", ".join(str(rank.number) for rank in failed)
        tracebacks = {rank.number: rank.failure or "" for rank in failed}
        for number, stacks in _dump_stacks(ranks).items():
            tracebacks[number] = f"still running when rank {failed[0].number} had failed:\n{stacks}"
        raise RankError(f"{len(failed)} of {len(ranks)} ranks failed: {names}", tracebacks)
    if waiting:
        names = ", ".join(str(rank.number) for rank in waiting.values())
        tracebacks = _dump_stacks(ranks)
        for rank in ranks:
            tracebacks.setdefault(rank.number, "had returned its result")
        summary = f"{len(waiting)} of {len(ranks)} ranks were still running after {timeout_s:g} s"
        raise RankTimeout(f"{summary}: {names}", dict(sorted(tracebacks.items())))


def _receive(rank: _Rank) -> None:
    rank.finished = True
    try:
        kind, value = pickle.loads(rank.pipe.recv_bytes())
    except EOFError:
        rank.process.join()
        rank.failure = f"died with exit code {rank.process.exitcode} before it returned"
        return
    if kind == "result":
        rank.result = value
    else:
        rank.failure = value


def _dump_stacks(ranks: list[_Rank]) -> dict[int, str]:
    """Make every rank that still runs write its threads' stacks, and read them."""
    running = [rank for rank in ranks if not rank.finished]
    for rank in running:
        with suppress(ProcessLookupError):
            os.kill(rank.process.pid or 0, signal.SIGUSR2)
    texts: dict[int, str] = {}
    deadline = time.monotonic() + _STACKS_S
    while time.monotonic() < deadline:
        time.sleep(0.05)
        before, texts = texts, {rank.number: _read(rank.stacks) for rank in running}
        if texts == before and all(texts.values()):
            break
    return {number: text or "wrote no stack" for number, text in texts.items()}


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _rank_main(
    number: int,
    num_ranks: int,
    rendezvous: Path,
    stacks: Path,
    pipe: connection.Connection,
    call: bytes,
    timeout_s: float,
) -> None:
    """Body of a rank's process: set up, call, answer, leave without interpreter teardown."""
    gc.freeze()  # collecting what the server has imported would copy its memory
    stacks_file = stacks.open("w")
    faulthandler.register(signal.SIGUSR2, file=stacks_file, all_threads=True)
    warnings.simplefilter("ignore")
    if logging.root.level != logging.WARNING:
        logging.root.setLevel(logging.WARNING)  # which touches every logger there is
    try:
        _initialise(number, num_ranks, rendezvous, timeout_s)
        function, args, kwargs = pickle.loads(call)
        answer = pickle.dumps(("result", function(*args, **kwargs)))
        exit_code = 0
    except BaseException:  # the SystemExit of a command under test is a failure to report, too
        answer = pickle.dumps(("error", traceback.format_exc()))
        exit_code = 1
    pipe.send_bytes(answer)
    if exit_code == 0:
        _leave_together(pipe)
    multiprocessing.util._run_finalizers()  # ends such helpers
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _initialise(number: int, num_ranks: int, rendezvous: Path, timeout_s: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(number),
        LOCAL_RANK=str(number),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
    )
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no look-up of the host's name
    dist.init_process_group(
        "gloo",
        init_method=rendezvous.as_uri(),
        rank=number,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s + _AFTER_FAILURE_S),  # the stacks come first
    )


def _leave_together(pipe: connection.Connection) -> None:
    """Keep this rank's connections open until every rank has its result, then close them."""
    import torch.distributed as dist

    try:
        pipe.recv_bytes()
    except EOFError:  # the parent gave up on another rank
        return
    if dist.is_initialized():
        dist.destroy_process_group()
