"""What waits inside of NCCL ends when all communicators of the process are aborted, all at once.

Written against the sources of PyTorch 2.13 and NCCL 2.30, and run with PyTorch 2.11 and NCCL 2.28.9
on one GPU that ranks share, which talk over sockets; not on several GPUs yet.

- A kernel that waits for a rank polls its communicator's abort flag. Once that is set it ends, and
  what is behind it on its stream runs. So a host that waits for the device comes back **without an
  error**, and reads whatever the kernel has left: gloo raises, NCCL does not. That is why nothing
  counts that a rank has heard of others once its epoch is over (`Membership.require_ongoing`,
  `Hearing`). What begins to communicate later raises: its communicator is gone.
- ``ncclCommAbort`` sets the flag, and then frees memory, for which CUDA waits for all that runs on
  the device: for kernels of other communicators, too, whose flags nobody has set yet if one is
  aborted after another (NVIDIA/nccl#564, pytorch#119797). All flags must be set before one is
  freed. NCCL's own means is a group of calls, which belongs to a thread. PyTorch's ``abort`` calls
  NCCL in a thread that it starts for it, so that ``_group_start`` around several of them, as in
  ``_abort_process_group``, holds nothing together. Here each has a thread of its own, and all begin
  together.
- ``ncclCommRevoke`` (2.28.7) ends what runs and keeps the rest, for communicators that are cut from
  it. PyTorch has no call for it, nor would it make a group of what is left, with those who join.
- ``_abort_process_group`` also forgets all groups, which the main thread still uses.
- A group that was aborted may yet make a communicator, of a pair of ranks or with its first use. So
  they are aborted again and again, until the main thread has left; a second abort of one does
  nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_hdp.overrides import Overrides

PATIENCE_S = 5.0
"""How long to wait for aborts before connections are shut although some are under way."""
_GPU = torch.device("cuda")

SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (
        "0",
        "else PyTorch's watchdog ends a rank whose communication fails because another one died",
    ),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": (
        "0",
        "else one failure anywhere leaves a word in the job's store, upon which each rank ends",
    ),
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": (
        "0",
        "else the watchdog sleeps four times as long behind a failure, 60 s, and nothing can begin "
        "to communicate meanwhile",
    ),
    "NCCL_RAS_ENABLE": (
        "0",
        "NCCL's own report of ranks keeps connections that are shut with all others",
    ),
}
"""What a rank that survives sets before its first communicator, and why."""
_UNSET = {
    "NCCL_ASYNC_ERROR_HANDLING": ("0",),
    "TORCH_NCCL_DESYNC_DEBUG": ("0",),
    "NCCL_DESYNC_DEBUG": ("0",),
    "TORCH_DISTRIBUTED_DEBUG": ("OFF", "INFO"),
}
"""What undoes the first of them, unless it says one of these."""
UNRUN = (
    "--hdp-survive on GPUs has run on one GPU that ranks share, not on several yet: keep saving "
    "checkpoints"
)


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets what ranks on GPUs need to survive; call it before torch.distributed makes a group.

    Raises:
        ValueError: a variable says something else.
    """
    for name, wanted in _UNSET.items():
        if environment.get(name, wanted[0]).upper() not in wanted:
            raise ValueError(
                f"--hdp-survive: found {name}={environment[name]}, expected it unset: with it "
                f"{SETTINGS['TORCH_NCCL_ASYNC_ERROR_HANDLING'][1].removeprefix('else ')}"
            )
    for name, (value, why) in SETTINGS.items():
        found = environment.setdefault(name, value)
        if found != value:
            raise ValueError(
                f"--hdp-survive: found {name}={found}, expected {value}, or unset: {why}"
            )


def backends() -> dict[dist.ProcessGroup, Any]:
    """NCCL's backend of each group that this process knows and that has one."""
    kind = getattr(dist, "ProcessGroupNCCL", None)  # PyTorch without CUDA has none
    found: dict[dist.ProcessGroup, Any] = {}
    if kind is None:
        return found
    for group in list(distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # it has none for GPUs
            backend = group._get_backend(_GPU)
            if isinstance(backend, kind):
                found[group] = backend
    return found


class Communicators:
    """All of NCCL's communicators of this process, at any time.

    Args:
        patience_s: see `PATIENCE_S`.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._under_way: WeakKeyDictionary[dist.ProcessGroup, threading.Thread]
        self._under_way = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._has_told = False

    def abort(self) -> bool:
        """Aborts all of them, from any thread, any number of times; never raises.

        Returns:
            whether all have ended.
        """
        with self._lock:
            for group, backend in backends().items():
                before = self._under_way.get(group)
                if before is None or not before.is_alive():
                    self._under_way[group] = thread = threading.Thread(
                        target=self._abort, args=(backend,), name="abort-nccl", daemon=True
                    )
                    with suppress(RuntimeError):  # the interpreter ends
                        thread.start()
            threads = list(self._under_way.values())
        deadline = time.monotonic() + self._patience_s
        for thread in threads:
            if thread.is_alive():
                thread.join(max(deadline - time.monotonic(), 0.0))
        late = sum(thread.is_alive() for thread in threads)
        if late:
            self._tell(f"{late} aborts of NCCL's have not ended after {self._patience_s:g} s")
        return not late

    def _abort(self, backend: Any) -> None:
        try:
            backend.abort()
        except Exception as error:  # whatever it is, the others are aborted
            self._tell(f"an abort of NCCL's failed: {error}")

    def _tell(self, text: str) -> None:
        if not self._has_told:
            self._has_told = True
            os.write(2, f"megatron_hdp: {text}\n".encode())


_HEARD = (
    *("barrier", "monitored_barrier", "all_gather_object", "gather_object"),
    *("broadcast_object_list", "scatter_object_list"),
)


@contextmanager
def hearing(require_ongoing: Callable[[], None]) -> Iterator[None]:
    """While entered, what torch.distributed gives the host itself is asked whether it counts.

    Args:
        require_ongoing: raises if it does not.
    """
    with Overrides() as overrides:
        for name in _HEARD:
            checked = _checked(getattr(dist, name), require_ongoing)
            for module in (dist, distributed_c10d):
                overrides.set(module, name, checked)
        yield


def _checked(original: Callable[..., Any], require_ongoing: Callable[[], None]) -> Any:
    def call(*positional: Any, **named: Any) -> Any:
        try:
            found = original(*positional, **named)
        finally:  # what an abort has left may look like anything, also to who reads it
            require_ongoing()
        return found

    return call


def settle(device: torch.device) -> None:
    """Waits until a GPU has done all that it was given, so that nothing of an old step runs."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def give_back(device: torch.device) -> None:
    """Gives memory that PyTorch keeps for later back: new communicators take theirs beside it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
