"""Optional packages, networks and GPUs: found or not, and one line of advice for each."""

import sys

import pytest

from megatron_hdp.megatron.doctor import surroundings
from megatron_hdp.megatron.doctor.surroundings import (
    OPTIONAL_PACKAGES,
    OptionalPackage,
    apex_advice,
    gpu_advice,
    network_advice,
    network_problems,
)


def packages():
    return {package.name: package for package in OPTIONAL_PACKAGES}


def test_each_tells_what_is_off_without_it_and_how_to_get_it():
    assert {"transformer-engine", "flash-attn", "NVIDIA apex", "ray"} <= set(packages())
    for package in OPTIONAL_PACKAGES:
        assert package.without_it and ("pip install" in package.remedy or "build" in package.remedy)


def test_the_remedies_name_extras_that_there_are():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    for package in OPTIONAL_PACKAGES:
        _, found, rest = package.remedy.partition("megatron-hdp[")
        assert not found or rest.partition("]")[0] in project["optional-dependencies"]


def test_what_is_found_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "a_package_here.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        surroundings,
        "OPTIONAL_PACKAGES",
        (
            OptionalPackage("a-package-here", "a_package_here", "", ""),
            OptionalPackage("pytest", "pytest", "", ""),
            OptionalPackage("none", "no_such_package", "", ""),
        ),
    )
    assert [check.found for check in surroundings.check_packages()] == [
        "found",
        pytest.__version__,
        None,
    ]


def test_apex_is_known_by_its_extension_only():
    modules = {package.module for package in OPTIONAL_PACKAGES}
    assert "fused_weight_gradient_mlp_cuda" in modules and "apex" not in modules


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Makes packages that can be found, and none other of the name apex."""
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    monkeypatch.syspath_prepend(tmp_path)

    def make(*files):
        for name in files:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("raise AssertionError('imported')")

    return make


def test_pypis_apex_is_told_from_nvidias(installed):
    installed("apex/__init__.py", "apex/models.py")
    assert "not NVIDIA's" in apex_advice() and "pip uninstall apex" in apex_advice()


def test_apex_without_its_extensions_is_told(installed):
    installed("apex/__init__.py", "apex/optimizers/__init__.py")
    assert "without its CUDA extensions" in apex_advice()


def test_a_whole_apex_needs_no_advice(installed):
    installed("apex/__init__.py", "apex/optimizers/__init__.py", "amp_C.py")
    assert apex_advice() is None


@pytest.fixture
def interfaces(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(surroundings.psutil, "net_if_addrs", lambda: {"lo": [], "ib0": []})
    return monkeypatch


@pytest.mark.parametrize(
    ("variable", "value", "is_problem"),
    [
        ("GLOO_SOCKET_IFNAME", "ib0", False),
        ("GLOO_SOCKET_IFNAME", "ib0,lo", False),
        ("GLOO_SOCKET_IFNAME", "ib", True),
        ("GLOO_SOCKET_IFNAME", "ib0,eth0", True),
        ("NCCL_SOCKET_IFNAME", "ib", False),
        ("NCCL_SOCKET_IFNAME", "eth,ib", False),
        ("NCCL_SOCKET_IFNAME", "=ib", True),
        ("NCCL_SOCKET_IFNAME", "=ib0", False),
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "^docker", False),
    ],
)
def test_interfaces_that_the_environment_names(interfaces, variable, value, is_problem):
    interfaces.setenv(variable, value)
    problems = network_problems()
    assert len(problems) == is_problem
    assert all(f"export {variable} with one of ib0, lo" in line for line in problems)


def test_a_host_whose_name_means_the_loopback(interfaces):
    interfaces.setattr(surroundings.socket, "gethostbyname", lambda host: "127.0.1.1")
    interfaces.delenv("SLURM_JOB_NUM_NODES", raising=False)
    assert network_advice() is None  # one node needs no other's address
    interfaces.setenv("SLURM_JOB_NUM_NODES", "2")
    assert "127.0.1.1" in network_advice() and "GLOO_SOCKET_IFNAME" in network_advice()
    interfaces.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert network_advice() is None
    interfaces.delenv("GLOO_SOCKET_IFNAME")
    interfaces.setattr(surroundings.socket, "gethostbyname", lambda host: "10.0.0.7")
    assert network_advice() is None


def test_gpus_that_slurm_gave(monkeypatch):
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    assert gpu_advice(0) is None
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    assert gpu_advice(4) is None
    assert "torch sees 3 GPUs, Slurm gave 4" in gpu_advice(3)
