"""Variables that are read once, when CUDA or PyTorch starts, and what a run wants them to be."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from megatron_hdp.runtime.cuda.device import Run

CONNECTIONS, MODULES = "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"
MEMORY, OTHER_MEMORY = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
CUDNN, OTHER_CUDNN = "CUDNN_HOME", "CUDNN_PATH"
_MOST = 32
_BLACKWELL = (10, 0)
_SEGMENTS = "expandable_segments"
_REGISTERS_ALL = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"


@dataclass(frozen=True)
class Wish:
    """What a run sets a variable to."""

    names: tuple[str, ...]
    """The variable, and another that says the same, if there is one."""
    value: str
    why: str
    instead: str | None = None
    """The flag that keeps another value of the user's; None: it is kept."""

    def found_in(self, environment: Mapping[str, str]) -> str | None:
        """The name that the user has set; None if none is."""
        return next((name for name in self.names if name in environment), None)


def connections(run: Run) -> Wish | None:
    """Into how many hardware queues CUDA sorts a process's streams; None: its own number will do.

    CUDA reads ``CUDA_DEVICE_MAX_CONNECTIONS`` (1 to 32, 8 unless set) once, when it starts. Streams
    that share a queue run in the order of their launches, whatever they wait for.

    - One queue is what Megatron demands with tensor parallelism before Blackwell: it launches a
      collective before the product that shall hide it, and relies on their starting in that order.
    - Rings, gradient sync and copies to the host want queues of their own. In a shared one a copy
      that waits for its event holds up everything launched after it, computation too.
    - Where both are wanted Megatron's demand wins. Results are the same either way.
    """
    if run.capability is None:
        return None
    if run.tensor_parallel and run.capability < _BLACKWELL:
        why = "tensor-parallel communication overlaps only if it starts in the order of launches"
        return Wish((CONNECTIONS,), "1", why)
    why = "rings, gradient sync and copies to the host must not queue behind each other"
    return Wish((CONNECTIONS,), str(_MOST), why) if run.hybrid_data_parallel else None


def module_loading(run: Run) -> Wish | None:
    """When CUDA loads a kernel: at the start, not in the middle of a ring; None without rings.

    From 12.2 on CUDA loads a kernel with its first launch, unless ``CUDA_MODULE_LOADING`` is
    ``EAGER`` when it starts. Loading may wait for all that runs on the device, messages of rings
    and reductions of gradients too, which wait for other ranks. Under HDP ranks meet new shapes, so
    new kernels, in any micro-batch: each then stands still until the others have come, and for ever
    if they wait for what it would launch next. The order of messages leaves no such case
    (`planner.lockstep`); other libraries' may. Loading all kernels at the start costs seconds, and
    memory of the device.

    Images and sites export LAZY for programs of one GPU, so an inherited value is replaced unless
    the run asks to keep it.
    """
    why = "loading a kernel in the middle of a ring waits for the device, so for other ranks"
    has_rings = run.capability is not None and run.hybrid_data_parallel
    if not has_rings or run.keeps_module_loading:
        return None
    return Wish((MODULES,), "EAGER", why, "--hdp-module-loading inherit")


def allocator(run: Run) -> Wish | None:
    """How PyTorch asks for a GPU's memory: in segments that grow, because shapes never repeat.

    By default its allocator keeps what it got in blocks of the sizes that were asked for. Under HDP
    each micro-batch has a size of its own, so blocks of old sizes stay behind, and memory runs out
    though much of it is free. With ``expandable_segments:True`` a segment's end is moved instead.

    PyTorch 2.13 reads ``PYTORCH_CUDA_ALLOC_CONF``, and only where that is not set
    ``PYTORCH_ALLOC_CONF``; other releases take the second name first. Both know both. Here the
    first name is set, which is the one that Megatron looks at before it does what expandable
    segments exclude, and only where neither is.
    """
    why = "micro-batches have sizes of their own, and blocks of old sizes would stay behind"
    has_rings = run.capability is not None and run.hybrid_data_parallel
    return Wish((MEMORY, OTHER_MEMORY), f"{_SEGMENTS}:True", why) if has_rings else None


def cudnn(run: Run) -> Wish | None:
    """Whose cuDNN TransformerEngine loads: PyTorch's own; None where that is the system's.

    It looks in ``CUDNN_HOME``, ``CUDNN_PATH`` and ``CUDA_HOME``, then for ``libcudnn.so``, a name
    that the system's has and pip's package has not. PyTorch loads the package's. Where both are, as
    in images with cuDNN on which PyTorch was installed by pip, one process has parts of two
    versions, and cuDNN refuses every graph (``CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED``).
    """
    if run.capability is None or not run.hybrid_data_parallel:
        return None
    folder = _cudnn_of_pip()
    why = "with another cuDNN than PyTorch's in one process TransformerEngine has no kernels"
    return None if folder is None else Wish((CUDNN, OTHER_CUDNN), str(folder), why)


def _cudnn_of_pip() -> Path | None:
    for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        with suppress(metadata.PackageNotFoundError):
            folder = Path(str(metadata.distribution(name).locate_file("nvidia/cudnn")))
            return folder if folder.is_dir() else None
    return None


def has_one_queue(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether CUDA runs all streams of this process in the order of launches."""
    return environment.get(CONNECTIONS) == "1"


SETTINGS: dict[str, Callable[[Run], Wish | None]] = {
    "CUDA connections": connections,
    "CUDA modules": module_loading,
    "CUDA allocator": allocator,
    "cuDNN": cudnn,
}


def doubt(wish: Wish, name: str, found: str) -> str | None:
    """What is to be said of the user's value of a variable: one line, or None if it is as good.

    Raises:
        ValueError: CUDA does not take it.
    """
    if name == CONNECTIONS:
        if not found.isdecimal() or not 1 <= int(found) <= _MOST:
            raise ValueError(
                f"{name} is {found!r}, expected a number from 1 to {_MOST}: unset it, and "
                f"{wish.value} is used"
            )
        is_as_good = (int(found) == 1) == (wish.value == "1")
        price = f"{wish.value} would be faster"
    elif name in (CUDNN, OTHER_CUDNN):
        is_as_good, price = os.path.realpath(found) == os.path.realpath(wish.value), "at a risk"
    else:  # whatever it says of segments is meant so
        is_as_good, price = _SEGMENTS in found, f"with {wish.value} in it less memory would be lost"
    return None if is_as_good else f"{name}={found} is kept, {price}: {wish.why}"


def obstacle(wish: Wish, run: Run, environment: Mapping[str, str]) -> str | None:
    """What expandable segments do not go together with in this run; None if they do.

    - pools of memory of another kind (``torch.cuda.MemPool``), in which Megatron registers buffers
      with NCCL (``--use-nccl-ub``): it refuses both together
    - registering all that is allocated with NCCL: PyTorch switches that off
    - WSL, some of whose drivers fail

    CUDA graphs need ``NCCL_GRAPH_REGISTER=0`` with them; HDP has none.
    """
    if MEMORY not in wish.names:
        return None
    if run.registers_buffers:
        return "--use-nccl-ub registers buffers in a pool that cannot have them"
    if environment.get(_REGISTERS_ALL, "0").lower() in ("1", "true", "t", "yes", "y"):
        return f"{_REGISTERS_ALL} would be switched off by them"
    if "microsoft" in platform.release().lower():
        return "drivers under WSL may fail with them"
    return None
