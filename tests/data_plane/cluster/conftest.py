"""What the tests of Ray's nodes share."""

import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """An empty folder for temporary files with a short name."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as short:
        monkeypatch.setenv("TMPDIR", short)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(short)
