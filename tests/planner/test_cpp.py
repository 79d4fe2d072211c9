"""The planner's own C++ unit tests, with the sanitizers."""

from pathlib import Path

from tests.support.cpp import run_cpp_tests


def test_cpp_unit_tests(tmp_path: Path) -> None:
    run_cpp_tests("planner", ["planner/**/*.cpp", "tests/*.cpp"], tmp_path)
