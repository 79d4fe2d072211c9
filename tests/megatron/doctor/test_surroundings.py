"""Optional packages, networks and GPUs: found or not, and one line of advice for each."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

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

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("package", OPTIONAL_PACKAGES, ids=lambda package: package.name)
def test_each_tells_what_is_off_without_it_and_how_to_get_it(package):
    assert package.without_it and ("pip install" in package.remedy or "build" in package.remedy)
    _, found, rest = package.remedy.partition("megatron-hdp[")
    assert not found or rest.partition("]")[0] in PROJECT["optional-dependencies"]


def test_transformer_engine_is_never_installed_in_isolation():
    """Its build needs the torch that is there: pip's isolated one fails."""
    root, pattern = Path(__file__).parents[3], re.compile(r"\[(?:[a-z,-]+,)?gpu[,\]]")
    folders = ("megatron_hdp", "scripts", "docs", "README.md", "CONTRIBUTING.md")
    files = subprocess.run(
        ["git", "ls-files", *folders], cwd=root, capture_output=True, text=True, check=True
    )
    found = [
        " ".join(text[max(0, match.start() - 90) : match.end()].replace('"', " ").split())
        for text in ((root / name).read_text(errors="replace") for name in files.stdout.split())
        for match in pattern.finditer(text)
        if "install" in text[max(0, match.start() - 90) : match.start()]
    ]
    assert len(found) >= 3 and all("install --no-build-isolation" in one for one in found), found


def test_what_is_found_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "a_package_here.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("a-package-here", "pytest", "none")
    packages = tuple(OptionalPackage(name, name.replace("-", "_"), "", "") for name in names)
    monkeypatch.setattr(surroundings, "OPTIONAL_PACKAGES", packages)
    found = [check.found for check in surroundings.check_packages()]
    assert found == ["found", pytest.__version__, None]


def test_apex_is_known_by_its_extension_only():
    modules = {package.module for package in OPTIONAL_PACKAGES}
    assert "fused_weight_gradient_mlp_cuda" in modules and "apex" not in modules


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["apex/models.py"], ["not NVIDIA's", "pip uninstall apex"]),
        (["apex/optimizers/__init__.py"], ["without its CUDA extensions"]),
        (["apex/optimizers/__init__.py", "amp_C.py"], []),
    ],
    ids=["pypis", "without-extensions", "whole"],
)
def test_an_apex_that_is_not_nvidias_or_lacks_its_extensions(tmp_path, monkeypatch, files, words):
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("apex/__init__.py", *files):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise AssertionError('imported')")
    advice = apex_advice()
    assert all(word in advice for word in words) if words else advice is None


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
