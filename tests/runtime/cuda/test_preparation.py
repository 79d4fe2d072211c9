"""What CUDA and PyTorch read at their start is set before; the driver is asked first."""

import ctypes
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from megatron_hdp.runtime.cuda import Run, describe, device, preparation, prepare, run_of, settings
from megatron_hdp.runtime.cuda.device import EAGER, compute_capability, loading_mode
from megatron_hdp.runtime.cuda.settings import CONNECTIONS as QUEUES
from megatron_hdp.runtime.cuda.settings import CUDNN, MEMORY, MODULES, OTHER_CUDNN, OTHER_MEMORY

HOPPER, BLACKWELL = (9, 0), (10, 0)
HDP = {MODULES: "EAGER", MEMORY: "expandable_segments:True"}
RUN = Run(capability=HOPPER, hybrid_data_parallel=True)


@pytest.fixture(autouse=True)
def neither_torch_nor_cuda_has_started(monkeypatch):
    monkeypatch.setattr(preparation, "sys", SimpleNamespace(modules={}))
    monkeypatch.setattr(preparation, "loading_mode", lambda: None)
    monkeypatch.setattr(settings, "_cudnn_of_pip", lambda: None)


@pytest.mark.parametrize(
    ("capability", "tensor_parallel", "hdp", "expected"),
    [
        (HOPPER, True, False, {QUEUES: "1"}),  # as Megatron demands
        (HOPPER, True, True, {QUEUES: "1", **HDP}),
        (HOPPER, False, True, {QUEUES: "32", **HDP}),
        (HOPPER, False, False, {}),
        (BLACKWELL, True, True, {QUEUES: "32", **HDP}),
        (BLACKWELL, True, False, {}),
        ((12, 0), True, False, {}),
        (None, True, True, {}),
    ],
)
def test_what_a_run_sets(capability, tensor_parallel, hdp, expected):
    run = Run(capability=capability, tensor_parallel=tensor_parallel, hybrid_data_parallel=hdp)
    environment = {}
    assert prepare(run, environment) == []
    assert environment == expected


GROWS = "expandable_segments:True"


@pytest.mark.parametrize(
    ("name", "found", "tensor_parallel", "doubt"),
    [
        (QUEUES, "1", True, None),
        (QUEUES, "8", True, "1 would be"),
        (QUEUES, "1", False, "32 would be"),
        (QUEUES, "8", False, None),
        (MODULES, "EAGER", False, None),
        *((one, "expandable_segments:False", False, None) for one in (MEMORY, OTHER_MEMORY)),
        *((one, f"max_split_size_mb:5,{GROWS}", False, None) for one in (MEMORY, OTHER_MEMORY)),
        *((one, "max_split_size_mb:5", False, f"with {GROWS}") for one in (MEMORY, OTHER_MEMORY)),
    ],
)
def test_what_a_user_has_set_is_kept_and_doubted(name, found, tensor_parallel, doubt):
    environment = {name: found}
    run = Run(capability=HOPPER, tensor_parallel=tensor_parallel, hybrid_data_parallel=True)
    lines = prepare(run, environment)
    wanted = {QUEUES: "1" if tensor_parallel else "32", **HDP, name: found}
    if name == OTHER_MEMORY:
        del wanted[MEMORY]
    assert environment == wanted
    assert len(lines) == (doubt is not None)
    assert all(line.startswith(f"{name}={found} is kept, {doubt}") for line in lines)


@pytest.mark.parametrize("found", ["LAZY", "DEFAULT", ""])
def test_module_loading_is_replaced_unless_it_is_to_be_kept(found, monkeypatch):
    """CUDA that has started has read it."""
    environment = {MODULES: found, QUEUES: "32"}
    (line,) = prepare(RUN, environment)
    assert environment[MODULES] == "EAGER" and prepare(RUN, environment) == []
    assert line.startswith(f"{MODULES}={found} is replaced by EAGER: loading a kernel")
    assert "--hdp-module-loading inherit keeps it" in line
    said = describe(HOPPER, {MODULES: found})["CUDA modules"]
    assert said.startswith(f"{found} is set; a run replaces it by EAGER with HDP")
    for before in ({MODULES: found}, {}):
        environment = {QUEUES: "32", **before}
        assert prepare(replace(RUN, keeps_module_loading=True), environment) == []
        assert environment.get(MODULES) == before.get(MODULES)
    monkeypatch.setattr(preparation, "loading_mode", lambda: 2)
    (line,) = prepare(RUN, {MODULES: found, QUEUES: "32"})
    assert f"CUDA started before {MODULES} could be set: export {MODULES}=EAGER" in line


@pytest.mark.parametrize(
    ("environment", "hdp", "wanted", "words"),
    [
        ({}, True, {CUDNN: "site/nvidia/cudnn"}, None),
        ({}, False, {}, None),
        ({CUDNN: "site/lib/../nvidia/cudnn"}, True, {}, None),
        ({OTHER_CUDNN: "/usr"}, True, {}, f"{OTHER_CUDNN}=/usr is kept, at a risk: with another"),
    ],
)
def test_transformer_engine_finds_the_cudnn_of_torch(environment, hdp, wanted, words, monkeypatch):
    monkeypatch.setattr(settings, "_cudnn_of_pip", lambda: Path("site/nvidia/cudnn"))
    before = environment | dict.fromkeys((QUEUES,), "32") | HDP
    run, found = replace(RUN, hybrid_data_parallel=hdp), dict(before)
    lines = prepare(run, found)
    assert found == before | wanted
    assert [line.startswith(words or "") for line in lines] == ([True] if words else [])
    assert describe(None, {})["cuDNN"] == "no matter without a GPU"
    assert describe(HOPPER, {})["cuDNN"].startswith("not set: a run sets site/nvidia/cudnn with")


def test_a_transformer_engine_that_is_imported_has_looked_for_cudnn(monkeypatch):
    monkeypatch.setattr(settings, "_cudnn_of_pip", lambda: Path("site/nvidia/cudnn"))
    modules = SimpleNamespace(modules={"transformer_engine": None})
    monkeypatch.setattr(preparation, "sys", modules)
    environment = {QUEUES: "32"} | HDP
    (line,) = prepare(RUN, environment)
    assert line.startswith(f"TransformerEngine started before {CUDNN} could be set: export {CUDNN}")
    assert CUDNN not in environment


@pytest.mark.parametrize("is_there", [True, False])
def test_the_cudnn_of_pip_is_found_by_its_package(monkeypatch, tmp_path, is_there):
    """As pip installs it: the name of a package, and its files beside those of torch."""
    package = tmp_path / "nvidia_cudnn_cu12-9.19.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: nvidia-cudnn-cu12\nVersion: 9.19.0\n")
    if is_there:
        (tmp_path / "nvidia/cudnn").mkdir(parents=True)
    monkeypatch.undo()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert settings._cudnn_of_pip() == (tmp_path / "nvidia/cudnn" if is_there else None)


@pytest.mark.parametrize("found", ["0", "33", "many", "-1", ""])
def test_what_cuda_does_not_take_is_refused(found):
    environment = {QUEUES: found}
    with pytest.raises(ValueError, match=r"expected a number from 1 to 32: unset it"):
        prepare(RUN, environment)
    assert environment == {QUEUES: found}


@pytest.mark.parametrize(
    "run, environment, release, words",
    [
        (replace(RUN, registers_buffers=True), {}, "6.1", "-ub"),
        (RUN, {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}, "6.1", "switched off"),
        (RUN, {}, "5.15.90.1-microsoft-standard-WSL2", "under WSL"),
    ],
)
def test_what_excludes_expandable_segments_is_said(run, environment, release, words, monkeypatch):
    monkeypatch.setattr(settings.platform, "release", lambda: release)
    environment = dict(environment)
    (line,) = prepare(run, environment)
    assert "expandable_segments:True is left out" in line and words in line
    assert MEMORY not in environment and environment[MODULES] == "EAGER"
    if run is RUN:
        assert "is left out" in describe(HOPPER, environment)["CUDA allocator"]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_torch_that_is_imported_is_told(monkeypatch, is_new):
    """By the function of its release."""
    told = []
    new = {"_accelerator_setAllocatorSettings": told.append} if is_new else {}
    old = {} if is_new else {"_set_allocator_settings": told.append}
    memory = SimpleNamespace(memory=SimpleNamespace(**old))
    preparation.sys.modules["torch"] = SimpleNamespace(_C=SimpleNamespace(**new), cuda=memory)
    assert prepare(RUN, {}) == []
    assert told == ["expandable_segments:True"]
    assert prepare(RUN, {MEMORY: "max_split_size_mb:512"}) and len(told) == 1


def test_this_torch_can_be_told():
    import torch

    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    assert "expandable_segments:True" in torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings("")


@pytest.mark.slow
def test_this_torch_reads_the_old_name_first_then_the_new_one():
    code = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    for names in ((OTHER_MEMORY,), (MEMORY, OTHER_MEMORY)):
        found = {name: f"max_split_size_mb:{100 + len(name)}" for name in names}
        outcome = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=found, timeout=570
        )
        assert outcome.stdout.split() == [found[names[0]]], outcome.stderr
        assert "deprecat" not in outcome.stderr


def test_what_cuda_has_read_is_not_changed_but_told(monkeypatch):
    monkeypatch.setattr(preparation, "loading_mode", lambda: 2)
    environment = {}
    queues, modules = prepare(RUN, environment)
    assert f"CUDA started before {QUEUES} could be set: export {QUEUES}=32" in queues
    assert f"export {MODULES}=EAGER, or start with" in modules
    assert environment == {MEMORY: HDP[MEMORY]}
    monkeypatch.setattr(preparation, "loading_mode", lambda: 1)
    assert len(prepare(RUN, {QUEUES: "32"})) == 0


@pytest.mark.parametrize(
    "line, hdp, tensor_parallel, registers",
    [
        ("--num-layers 2", False, False, False),
        ("--tensor-model-parallel-size 2 --use-nccl-ub", False, False, False),
        ("--hybrid-data-parallel --tensor-model-parallel-size 1", True, False, False),
        ("--hybrid-data --tensor-model-parallel-size=4 --unknown x", True, True, False),
        ("a --use-nccl-ub --hybrid-data-parallel", True, False, True),
        ("--hybrid-data-parallel --hdp-module-loading inherit", True, False, False),
    ],
)
def test_a_script_is_known_from_its_arguments(line, hdp, tensor_parallel, registers, monkeypatch):
    monkeypatch.setattr(device, "compute_capability", lambda: HOPPER)
    assert run_of(line.split()) == Run(
        capability=HOPPER if hdp else None,
        hybrid_data_parallel=hdp,
        tensor_parallel=tensor_parallel,
        registers_buffers=registers,
        keeps_module_loading="inherit" in line,
    )


def test_words_for_doctor():
    assert set(describe(None, {}).values()) == {"no matter without a GPU"}
    user = {QUEUES: "1", OTHER_MEMORY: "backend:native"}
    for label, gpu, environment, words in (
        ("connections", HOPPER, {}, "not set: a run sets 32 with HDP, 1 with tensor parallelism: "),
        ("modules", HOPPER, {}, "not set: a run sets EAGER with HDP: loading a"),
        ("allocator", HOPPER, {}, f"not set: a run sets {GROWS} with HDP: "),
        ("connections", BLACKWELL, {}, "not set: a run sets 32 with HDP:"),
        ("connections", HOPPER, user, "1 is set and kept; a run would set 32 with HDP"),
        ("allocator", HOPPER, user, "backend:native is set and kept; a run would set "),
    ):
        assert describe(gpu, environment)[f"CUDA {label}"].startswith(words)


_HOOK = f"""
import os, sys
from megatron_hdp.runtime import cuda
from megatron_hdp.runtime.cuda import device
cuda.compute_capability = device.compute_capability = lambda: (9, 0)
def find_spec(name, path=None, target=None):
    if name.split(".")[0] in ("torch", "megatron"):
        print(*(os.environ.get(name) for name in {(QUEUES, MODULES, MEMORY)}))
        sys.exit(0)
    return None
class finder:
    find_spec = staticmethod(find_spec)
sys.meta_path.insert(0, finder)
"""
_COMMAND = "from megatron_hdp import pretrain_gpt; pretrain_gpt.main(sys.argv[1:])"
_SCRIPT = "from megatron_hdp import plugin; plugin.run(sys.argv[1], sys.argv[2:])"


def at_first_import(code, *arguments):
    outcome = subprocess.run(
        [sys.executable, "-c", _HOOK + code, *arguments],
        capture_output=True,
        text=True,
        timeout=570,
        env={"PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": ""},
    )
    assert outcome.stdout, outcome.stderr
    return outcome.stdout.split()


def test_the_command_and_the_plugin_set_all_before_they_import_torch(tmp_path: Path):
    flags = shlex.split(
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --train-iters 1 "
        "--lr 1 --data-path nowhere --hybrid-data-parallel --hdp-tokens-per-rank 8 "
        "--global-batch-size 1 --attention-dropout 0"
    )
    assert at_first_import(_COMMAND, *flags) == ["32", "EAGER", "expandable_segments:True"]
    script = tmp_path / "pretrain_gpt.py"
    script.touch()
    flags = ["--hybrid-data-parallel", "--tensor-model-parallel-size", "2"]
    found = at_first_import(_SCRIPT, str(script), *flags)
    assert found == ["1", "EAGER", "expandable_segments:True"]
    assert at_first_import(_SCRIPT, str(script)) == ["None"] * 3


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
