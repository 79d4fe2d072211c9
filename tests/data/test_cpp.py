"""The C++ unit tests of the order of the data and of sources, with the sanitizers."""

from pathlib import Path

from tests.support.cpp import run_cpp_tests


def test_cpp_unit_tests(tmp_path: Path) -> None:
    run_cpp_tests("data", ["data/**/*.cpp", "tests/data/*.cpp"], tmp_path)
