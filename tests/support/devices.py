"""The devices that a test body runs on: the CPU always, the GPU where it is asked for."""

import pytest
import torch

CPU_AND_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def device_of(name):
    """The test's device; skips, with what to do, where there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: run scripts/gpu_check.sh on a machine that has one")
    return torch.device(name, 0) if name == "cuda" else torch.device(name)
