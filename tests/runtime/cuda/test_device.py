"""The driver is asked without starting CUDA, and what it does not answer is not known."""

import ctypes
from types import SimpleNamespace
from unittest import mock

import pytest

from megatron_hdp.runtime.cuda import device
from megatron_hdp.runtime.cuda.device import EAGER, compute_capability, loading_mode

HOPPER = (9, 0)


class Driver:
    """An NVML that answers, or fails in one call."""

    def __init__(self, failing: str | None = None) -> None:
        self.failing = failing
        self.calls: list[str] = []

    def __getattr__(self, name):
        def call(*args):
            self.calls.append(name)
            if name == self.failing:
                return 9
            if name == "nvmlDeviceGetCudaComputeCapability":
                for pointer, value in zip(args[1:], HOPPER, strict=True):
                    ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = value
            return 0

        return call


@pytest.mark.parametrize(
    "failing",
    [None, "nvmlInit_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetCudaComputeCapability"],
)
def test_the_driver_is_asked(monkeypatch, failing):
    driver = Driver(failing)
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert compute_capability() == (None if failing else HOPPER)
    assert failing == "nvmlInit_v2" or driver.calls[-1] == "nvmlShutdown"


def test_hidden_gpus_and_a_machine_without_driver_are_none(monkeypatch):
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert compute_capability() is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(device.ctypes, "CDLL", mock.Mock(side_effect=OSError))
    assert compute_capability() is None


def lazily(pointer):
    """What a libcuda that has started answers."""
    ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = 2
    return 0


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        (SimpleNamespace(cuModuleGetLoadingMode=lambda pointer: 3), None),  # not initialised
        (SimpleNamespace(cuModuleGetLoadingMode=lazily), 2),
        (object(), None),  # before CUDA 11.7
    ],
)
def test_the_loading_mode_is_known_once_cuda_has_started(monkeypatch, driver, expected):
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: driver)
    assert loading_mode() == expected != EAGER
