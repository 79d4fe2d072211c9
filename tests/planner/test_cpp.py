"""Compiles the planner's own C++ unit tests with the sanitizers and runs them."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"


def test_cpp_unit_tests(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler: install g++ to run the planner's C++ tests")
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]
    options = ["-std=c++17", "-O1", "-g0", "-I", str(CSRC), *warnings, *sanitizers]
    sources = sorted([*CSRC.glob("planner/*.cpp"), *CSRC.glob("tests/*.cpp")])
    objects = [str(tmp_path / f"{source.stem}.o") for source in sources]

    def compile_one(source: Path, target: str) -> None:
        subprocess.run([compiler, *options, "-c", str(source), "-o", target], check=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, sources, objects))
    binary = str(tmp_path / "planner_test")
    subprocess.run([compiler, *sanitizers, *objects, "-o", binary], check=True)
    result = subprocess.run([binary], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
