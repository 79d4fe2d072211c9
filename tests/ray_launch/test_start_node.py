"""``ray start`` as the cluster runs it: no server beside it that nobody asks."""

import os
import subprocess
import sys

import pytest

from megatron_hdp.ray_launch import start_node

FAKE_SCRIPTS = """
import sys
from ray._private.node import Node

def main():
    node = Node()
    node.start_api_server(include_dashboard=False, raise_on_failure=False)
    try:
        import grpc
    except ImportError:
        grpc = None
    print(sys.argv[1:], node._webui_url, grpc)
"""
FAKE_NODE = """
class Node:
    def start_api_server(self, *, include_dashboard, raise_on_failure):
        raise SystemExit("a web server")
"""


@pytest.fixture
def fake_ray(tmp_path):
    for name, text in {
        "ray/__init__.py": "",
        "ray/_private/__init__.py": "",
        "ray/_private/node.py": FAKE_NODE,
        "ray/scripts/__init__.py": "",
        "ray/scripts/scripts.py": FAKE_SCRIPTS,
        "grpc.py": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_no_server_is_started_that_nobody_asks(fake_ray):
    words = [sys.executable, start_node.__file__, "start", "--block"]
    environment = {**os.environ, "PYTHONPATH": str(fake_ray)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout == "['start', '--block'] None None\n", done.stderr


def test_ray_has_what_is_left_out():
    """Otherwise a newer Ray starts its web server again, and nobody notices."""
    node = pytest.importorskip("ray._private.node", reason="pip install 'megatron-hdp[ray]'")
    assert callable(node.Node.start_api_server)
