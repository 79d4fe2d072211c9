"""Sources that the commands' tests read."""

import pytest

from tests.support.sources import write_sources


@pytest.fixture
def folder(tmp_path):
    return write_sources(tmp_path)
