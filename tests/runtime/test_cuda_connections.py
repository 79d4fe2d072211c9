"""The number of CUDA's queues is chosen before CUDA starts, and a user's choice is kept."""

import ctypes
import shlex
import subprocess
import sys

import pytest

from megatron_hdp.runtime import cuda_connections
from megatron_hdp.runtime.cuda_connections import (
    VARIABLE,
    compute_capability,
    describe,
    prepare,
    wanted,
)

HOPPER, BLACKWELL = (9, 0), (10, 0)


@pytest.mark.parametrize(
    ("capability", "tensor_parallel", "hdp", "number"),
    [
        (HOPPER, True, False, 1),  # as Megatron demands
        (HOPPER, True, True, 1),
        (HOPPER, False, True, 32),
        (HOPPER, False, False, None),
        (BLACKWELL, True, True, 32),
        (BLACKWELL, True, False, None),
        ((12, 0), True, False, None),
        (None, True, True, None),
    ],
)
def test_what_a_run_wants(capability, tensor_parallel, hdp, number):
    want = wanted(capability, tensor_parallel=tensor_parallel, hybrid_data_parallel=hdp)
    assert (want and want.number) == number
    environment = {}
    prepare(
        capability,
        tensor_parallel=tensor_parallel,
        hybrid_data_parallel=hdp,
        environment=environment,
    )
    assert environment == ({} if number is None else {VARIABLE: str(number)})


@pytest.mark.parametrize(
    ("tensor_parallel", "found", "doubt"),
    [(True, "1", False), (True, "8", True), (False, "1", True), (False, "8", False)],
)
def test_a_users_choice_is_kept_and_doubted(tensor_parallel, found, doubt):
    environment = {VARIABLE: found}
    line = prepare(
        HOPPER, tensor_parallel=tensor_parallel, hybrid_data_parallel=True, environment=environment
    )
    assert environment == {VARIABLE: found}
    assert (line is not None) == doubt
    if line is not None:
        assert f"{VARIABLE}={found} is kept, {1 if tensor_parallel else 32} would" in line


@pytest.mark.parametrize("found", ["0", "33", "many", "-1", ""])
def test_what_cuda_does_not_take_is_refused(found):
    with pytest.raises(ValueError, match=r"expected a number from 1 to 32: unset it"):
        prepare(
            HOPPER, tensor_parallel=False, hybrid_data_parallel=True, environment={VARIABLE: found}
        )


def test_words_for_doctor():
    assert describe(None, None) == "no matter without a GPU"
    assert describe(HOPPER, None) == "not set: a run sets 32 with HDP, 1 with tensor parallelism"
    assert describe(BLACKWELL, None) == "not set: a run sets 32 with HDP"
    assert describe(HOPPER, "1").startswith("1 is set and kept; a run would set 32 with HDP")


_COMMAND = """
import os, sys
from megatron_hdp.runtime import cuda_connections
cuda_connections.compute_capability = lambda: (9, 0)
from megatron_hdp import pretrain_gpt
def find_spec(name, path=None, target=None):
    if name.split(".")[0] in ("torch", "megatron"):
        print("at import", name.split(".")[0], os.environ.get(cuda_connections.VARIABLE))
        sys.exit(0)
    return None
class finder:
    find_spec = staticmethod(find_spec)
sys.meta_path.insert(0, finder)
pretrain_gpt.main(sys.argv[1:])
"""


def test_the_command_sets_it_before_it_imports_torch():
    flags = shlex.split(
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --train-iters 1 "
        "--lr 1 --data-path nowhere --hybrid-data-parallel --hdp-tokens-per-rank 8 "
        "--global-batch-size 1 --attention-dropout 0"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", _COMMAND, *flags],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": ""},
    )
    assert outcome.stdout.split() in (
        ["at", "import", name, "32"] for name in ("torch", "megatron")
    ), outcome.stdout + outcome.stderr


def test_a_machine_without_driver_has_no_capability(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(cuda_connections.ctypes, "CDLL", missing)
    assert compute_capability() is None


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
    monkeypatch.setattr(cuda_connections.ctypes, "CDLL", lambda name: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert compute_capability() == (None if failing else HOPPER)
    assert failing == "nvmlInit_v2" or driver.calls[-1] == "nvmlShutdown"


def test_hidden_gpus_are_none(monkeypatch):
    monkeypatch.setattr(cuda_connections.ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert compute_capability() is None
