"""The Python of TransformerEngine's wheel on a CPU, over stand-ins for its kernels and for CUDA.

The wheel of pure Python comes from the package index, or from the file that the variable
TRANSFORMER_ENGINE_WHEEL names. It is unpacked and never installed. `load` changes torch for the
process that it runs in.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import types
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import te_kernels

VERSION = "2.20.2"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megatron-hdp" / "wheels"
# imported at the top by modules beside attention, and called neither there nor here
_NOT_USED = ("transformer_engine.pytorch.onnx_extensions", "einops")


def wheel():
    """The wheel's path; skips the test where it cannot be had."""
    named = os.environ.get("TRANSFORMER_ENGINE_WHEEL")
    if named:
        return Path(named)
    pattern = f"transformer_engine-{VERSION}-*.whl"
    if not any(CACHE.glob(pattern)):
        CACHE.mkdir(parents=True, exist_ok=True)
        download = ["pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command = [sys.executable, "-m", *download, f"transformer-engine=={VERSION}"]
        done = subprocess.run([*command, "--dest", CACHE], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(
                "TransformerEngine's wheel could not be fetched: give pip a network, or name the "
                f"file of version {VERSION} with TRANSFORMER_ENGINE_WHEEL"
            )
    return next(CACHE.glob(pattern))


def unpack(folder):
    """Unpacks the wheel; returns the folder to give to `load`."""
    with zipfile.ZipFile(wheel()) as archive:
        archive.extractall(folder)
    return str(folder)


def load(folder, compute_capability=(9, 0), flash_attn=None):
    """Imports `transformer_engine` from the folder, over the stand-ins; returns the package.

    Args:
        folder: of `unpack`.
        compute_capability: of the GPU.
        flash_attn: where given, a stand-in for the package of that name that is then installed.
    """
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # loads no compiled library
    os.environ["NVTE_TORCH_COMPILE"] = "0"
    sys.path.insert(0, folder)
    _stand_in_for_cuda(folder, compute_capability)
    sys.modules["transformer_engine_torch"] = te_kernels.as_module()
    if flash_attn is not None:
        _install_flash_attn(flash_attn)
    for name in _NOT_USED:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__getattr__ = lambda attribute: None
    # its `common` is given no library to load before the package itself is executed
    spec = importlib.util.find_spec("transformer_engine")
    package = sys.modules["transformer_engine"] = importlib.util.module_from_spec(spec)
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    spec.loader.exec_module(package)
    return package


class Stream:
    """Everything is done when it was asked for."""

    def __init__(self, device=None):
        self.cuda_stream = 0

    def wait_event(self, event):
        """Nothing to wait for."""

    def wait_stream(self, stream):
        """Nothing to wait for."""

    def record_event(self, event=None):
        """Nothing to record."""
        return event


def _install_flash_attn(package):
    """With its distribution's version, by which TransformerEngine knows whether it is there."""
    for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_2_cuda"):
        sys.modules[name] = package
    of_others = importlib.metadata.version
    importlib.metadata.version = lambda name: (
        package.__version__ if name == "flash-attn" else of_others(name)
    )


class HostWaits(TorchDispatchMode):
    """Counts what on a GPU would let the host wait for it, by the library's lines that ask."""

    def __init__(self, folder):
        super().__init__()
        self.lines = Counter()
        self._folder = folder

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            frame = sys._getframe(1)
            while frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
                frame = frame.f_back
            if frame.f_code.co_filename.startswith(self._folder):
                self.lines[frame.f_lineno] += 1
        return function(*args, **(kwargs or {}))


def _stand_in_for_cuda(folder, compute_capability):
    major, minor = compute_capability
    gpu = types.SimpleNamespace(major=major, minor=minor, multi_processor_count=132)

    def is_asked_by_the_library(*about):
        """To the library there is a GPU, and every tensor is on it; to everybody else not."""
        return sys._getframe(1).f_code.co_filename.startswith(folder)

    stand_ins = {
        "Stream": Stream,
        "Event": lambda *how, **kw: None,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": Stream,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: gpu,
        "get_device_capability": lambda device=None: compute_capability,
        "is_current_stream_capturing": lambda: False,
        "is_available": is_asked_by_the_library,
    }
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    torch.Tensor.is_cuda = property(is_asked_by_the_library)
