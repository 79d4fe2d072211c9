"""Compiles the planner's own C++ unit tests with the sanitizers and runs them."""

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"


def test_cpp_unit_tests(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler: install g++ to run the planner's C++ tests")
    binary = tmp_path / "planner_test"
    sources = sorted(map(str, [*CSRC.glob("planner/*.cpp"), *CSRC.glob("tests/*.cpp")]))
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    options = ["-std=c++17", "-O1", "-g0", "-I", str(CSRC), "-o", str(binary)]
    subprocess.run([compiler, *options, *sanitizers, *sources], check=True)
    result = subprocess.run([str(binary)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
