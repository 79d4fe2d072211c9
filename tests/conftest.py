"""Fixtures that every test may ask for, and the tests that this machine cannot run."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.support import ranks


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., list[Any]]:
    """The one way to run a test on real gloo ranks; see tests/support/ranks.py."""
    return ranks.run_ranks


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Skips the tests marked gpu where there is none."""
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if for_gpu and not _has_gpu():
        for item in for_gpu:
            item.add_marker(
                pytest.mark.skip(reason="no NVIDIA GPU: run pytest -m gpu where one is")
            )


def _has_gpu() -> bool:
    import torch  # most tests do without it

    return bool(torch.cuda.is_available())
