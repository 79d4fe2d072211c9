"""Sources that are written and opened once; a folder for temporary files."""

import tempfile
from pathlib import Path

import pytest

from tests.support import thread_plane as plane


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """A file of --hdp-data that no test changes."""
    return plane.write_pairs(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="session")
def setup(sources):
    return plane.setup_of(sources)


@pytest.fixture(scope="session")
def corpus(setup):
    return plane.planner_of(setup).corpus


@pytest.fixture(scope="session")
def services(setup):
    return plane.loading_of(setup)


@pytest.fixture
def temporary(monkeypatch):
    """An empty folder for temporary files with a short name."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as short:
        monkeypatch.setenv("TMPDIR", short)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(short)
