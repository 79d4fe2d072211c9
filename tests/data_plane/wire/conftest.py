"""A server on a socket of its own."""

import pytest

from megatron_hdp.data_plane.wire import NodeServer
from tests.support.node import Echo


@pytest.fixture
def path(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path / "node.sock"


@pytest.fixture
def echo():
    return Echo()


@pytest.fixture
def server(path, echo):
    made = NodeServer(path, echo, message_s=0.5)
    yield made
    echo.may_answer.set()
    made.close()
