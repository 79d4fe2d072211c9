"""Fixtures that every test may ask for."""

from collections.abc import Callable
from typing import Any

import pytest

from tests import ranks


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., list[Any]]:
    """The one way to run a test on real gloo ranks; see tests/ranks.py."""
    return ranks.run_ranks
