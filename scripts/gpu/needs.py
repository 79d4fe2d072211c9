"""What a source tree needs from other packages to run, test and build: read from pyproject.toml.

``python scripts/gpu/needs.py`` prints what the interpreter lacks, ``... --carry`` what to take to a
machine that has torch and numpy but no internet, a requirement a line.
"""

import argparse
import importlib.metadata
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEST = ("pytest", "pytest-timeout", "hypothesis")
NEEDED_BY_THOSE = ("iniconfig", "packaging", "pluggy", "pygments", "sortedcontainers")
NEVER_CARRIED = ("torch", "numpy")  # large, and part of what makes a machine a GPU machine


def requirements(pyproject: Path = ROOT / "pyproject.toml") -> list[str]:
    """Return every requirement, such as ``orjson>=3.10``."""
    found = tomllib.loads(pyproject.read_text())
    test = found["project"]["optional-dependencies"]["test"]
    return [
        *found["project"]["dependencies"],
        *found["build-system"]["requires"],
        *(one for one in test if name_of(one) in TEST),
        *NEEDED_BY_THOSE,
    ]


def carried() -> list[str]:
    """Return those to carry to a machine that has torch and numpy."""
    return [one for one in requirements() if name_of(one) not in NEVER_CARRIED]


def lacking(wanted: list[str]) -> list[str]:
    """Return those of `wanted` that this interpreter does not have, or not in such a version."""
    return [one for one in wanted if not is_here(one)]


def is_here(requirement: str) -> bool:
    """Return whether a package is installed in a version that serves."""
    try:
        version = importlib.metadata.version(name_of(requirement))
    except importlib.metadata.PackageNotFoundError:
        return False
    bounds = re.findall(r"(>=|<)([0-9.]+)", requirement)
    numbers = _numbers(version)
    return all(
        numbers >= _numbers(bound) if sign == ">=" else numbers < _numbers(bound)
        for sign, bound in bounds
    )


def name_of(requirement: str) -> str:
    """Return the package's name: ``orjson>=3.10`` -> ``orjson``."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return found[0].lower()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--carry", action="store_true", help="what to carry, installed or not")
    print("\n".join(carried() if parser.parse_args().carry else lacking(requirements())))
