"""The C++ parts' own unit tests, with the sanitizers."""

from pathlib import Path

import pytest

from tests.support.cpp import run_cpp_tests


@pytest.mark.parametrize("name, tests", [("planner", "tests"), ("data", "tests/data")])
def test_cpp_unit_tests(name: str, tests: str, tmp_path: Path) -> None:
    run_cpp_tests(name, [f"{name}/**/*.cpp", f"{tests}/*.cpp"], tmp_path)
