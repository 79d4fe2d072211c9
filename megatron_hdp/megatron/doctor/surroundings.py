"""A machine's packages, network, GPUs and Megatron-LM: what is missing, its effect, the remedy.

Only a network interface that does not exist keeps training from running.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_hdp.planner.network import VARIABLES


@dataclass(frozen=True)
class OptionalPackage:
    """A package that a run can do without."""

    name: str
    module: str
    """What is looked for; for NVIDIA's apex an extension that its namesake on PyPI lacks."""
    without_it: str
    remedy: str
    """The command that gets it."""


@dataclass(frozen=True)
class PackageCheck:
    """An optional package, and its version (None: not found)."""

    package: OptionalPackage
    found: str | None


def _of_extra(name: str, extra: str, without_it: str) -> OptionalPackage:
    module = name.replace("-", "_")
    return OptionalPackage(name, module, without_it, f"pip install 'megatron-hdp[{extra}]'")


_KERNELS = "attention by other kernels"
OPTIONAL_PACKAGES = (
    OptionalPackage(
        "transformer-engine",
        "transformer_engine",
        f"{_KERNELS}; Megatron uses NVIDIA apex's Adam, or torch's",
        "pip install --no-build-isolation 'megatron-hdp[gpu]' (its build needs nvcc)",
    ),
    OptionalPackage(
        "flash-attn", "flash_attn", _KERNELS, "pip install flash-attn --no-build-isolation"
    ),
    OptionalPackage(
        "NVIDIA apex",
        "fused_weight_gradient_mlp_cuda",
        "Megatron uses torch's norms; local layers round weights' gradients in each micro-batch",
        "build it from https://github.com/NVIDIA/apex with its CUDA extensions; never "
        "`pip install apex`, another project",
    ),
    OptionalPackage(
        "DeepEP",
        "deep_ep",
        "no --moe-token-dispatcher-type flex",
        "build it from https://github.com/deepseek-ai/DeepEP",
    ),
    OptionalPackage(
        "triton", "triton", "the fused loss on a GPU works in plain PyTorch", "pip install triton"
    ),
    _of_extra("ray", "ray", "no data plane beside the ranks: no --hdp-loaders ray"),
    _of_extra("transformers", "tokenizers", "no --tokenizer-type HuggingFaceTokenizer"),
    _of_extra("tiktoken", "tokenizers", "no --tokenizer-type TikTokenizer"),
    _of_extra("tensorboard", "tensorboard", "no --tensorboard-dir"),
    _of_extra("matplotlib", "plot", "no --hdp-plot-plan and no plots of plans"),
)


def check_packages() -> tuple[PackageCheck, ...]:
    """Looks for each optional package and its version, "found" if it has none; imports none."""
    there = {one.name: importlib.util.find_spec(one.module) for one in OPTIONAL_PACKAGES}
    return tuple(
        PackageCheck(one, (version_of(one.name) or "found") if there[one.name] else None)
        for one in OPTIONAL_PACKAGES
    )


def version_of(distribution: str) -> str | None:
    """Its version; None for what is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def apex_advice() -> str | None:
    """What to do about an ``apex`` that is not NVIDIA's or lacks its extensions; None if nothing.

    Megatron imports ``apex`` by name, so it also finds PyPI's project of that name.
    """
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return None
    folders = [Path(place) for place in spec.submodule_search_locations or ()]
    if not any((folder / "optimizers").is_dir() for folder in folders):
        return (
            f"apex {version_of('apex') or '(no version)'} is not NVIDIA's but PyPI's project of "
            "that name: pip uninstall apex"
        )
    if importlib.util.find_spec("amp_C") is None:
        return (
            "NVIDIA apex is installed without its CUDA extensions, so its optimizer and norms "
            "do not work: build it again with them, or pip uninstall apex"
        )
    return None


def network_problems() -> list[str]:
    """Interfaces that the environment names for gloo or NCCL and that this machine lacks."""
    present = sorted(psutil.net_if_addrs())
    problems = []
    gloo = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    missing = [name for name in gloo if name not in present]
    if missing:
        problems.append(_no_interface("GLOO_SOCKET_IFNAME", missing, present))
    nccl = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if nccl and not nccl.startswith("^"):  # ^ excludes; = asks for a name, else for a beginning
        names = nccl.removeprefix("=").split(",")
        is_there = str.__eq__ if nccl.startswith("=") else str.startswith
        if not any(is_there(interface, name) for name in names for interface in present):
            problems.append(_no_interface("NCCL_SOCKET_IFNAME", names, present))
    return problems


def _no_interface(variable: str, names: list[str], present: list[str]) -> str:
    return (
        f"{variable} names {', '.join(names)}, which this machine does not have: unset it, or "
        f"export {variable} with one of {', '.join(present)}"
    )


def network_advice() -> str | None:
    """What to do if the host's name resolves to an address that other nodes cannot reach.

    A rank sends its address by its host's name. None if nothing is to be done.
    """
    num_nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if num_nodes == "1" or os.environ.get("GLOO_SOCKET_IFNAME"):
        return None
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "nothing"
    if address != "nothing" and not address.startswith("127."):
        return None
    return (
        f"this host's name, {host}, resolves to {address}, which other nodes cannot reach: export "
        "GLOO_SOCKET_IFNAME with the interface that the nodes share"
    )


def ring_channels() -> str:
    """NCCL's channels of two neighbours of a ring, by the size of the job, in words."""
    import torch.distributed as dist

    from megatron_hdp.options import HdpOptions
    from megatron_hdp.runtime.ring import running_nccl

    if not dist.is_nccl_available():
        return "none, this torch knows no NCCL"
    found = running_nccl(HdpOptions.hdp_ring_max_ctas)
    if found is None:
        return f"what {' or '.join(VARIABLES)} says"
    return f"{found.by_size()} (of a pair, with 8 HDP ranks a node; {found})"


def gpu_advice(found: int) -> str | None:
    """What to do about fewer GPUs than Slurm gave; None if nothing.

    Args:
        found: GPUs that torch sees.
    """
    given = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if not given.isdigit() or found >= int(given):
        return None
    return (
        f"torch sees {found} GPUs, Slurm gave {given}: install a torch built for this machine's "
        "CUDA driver, and check that CUDA_VISIBLE_DEVICES hides none"
    )


@dataclass(frozen=True)
class Checkout:
    """The Megatron-LM that a run finds: that of the current folder before any on Python's path.

    A run's script is in its checkout, and a script's folder comes first on Python's path. A command
    such as ``megatron-hdp`` has its own folder there and must look for itself.
    """

    folder: str
    """The one that has ``megatron/training``."""
    release: str
    is_current: bool
    """Whether it is the current folder; else it is on Python's path."""


@contextmanager
def current_folder_first() -> Iterator[None]:
    """Within the block Python finds the checkout of the current folder, if that is one."""
    folder = Path.cwd()
    if not (folder / "megatron" / "training").is_dir():
        yield
        return
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def find_checkout() -> Checkout | None:
    """The Megatron-LM that Python finds now; None if there is no ``megatron.training``."""
    spec = importlib.util.find_spec("megatron.training")
    if spec is None or not spec.submodule_search_locations:
        return None
    from megatron_hdp.megatron.lm.releases import installed_version

    folder = Path(next(iter(spec.submodule_search_locations))).resolve().parents[1]
    return Checkout(str(folder), installed_version(), folder == Path.cwd().resolve())
