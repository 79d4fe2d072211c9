"""The C++ part's own unit tests."""

from pathlib import Path

from tests.support.cpp import SANITIZED, run_cpp_tests


@SANITIZED
def test_cpp_unit_tests(tmp_path: Path, extra: tuple[str, ...]) -> None:
    run_cpp_tests("planner", ["planner/**/*.cpp", "tests/*.cpp"], tmp_path, extra)
