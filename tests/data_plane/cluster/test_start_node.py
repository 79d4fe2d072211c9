"""``ray start`` as the cluster runs it: no server that nobody asks, and no end before its time."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hdp.data_plane.cluster import start_agent, start_node

FAKE_SCRIPTS = """
import subprocess
import sys
from ray._private import services
from ray._private.node import Node

def main():
    node = Node()
    node.start_api_server(include_dashboard=False, raise_on_failure=False)
    try:
        import grpc
    except ImportError:
        grpc = None
    print(sys.argv[1:], node._webui_url, grpc)
    print(services.get_node("address", "node"), flush=True)
    for kind in ("raylet", "gcs_server") if len(sys.argv) > 4 else ():
        words = [kind, "--dashboard_agent_command=python -u '/x y/dashboard/agent.py' --minimal"]
        words[1] = words[1].replace("'", '"')  # as list2cmdline does
        print(services.start_ray_process(words, kind, fate_share=True), flush=True)
    if "wait" in sys.argv:
        child = subprocess.Popen(["sleep", "0.2"])
        node.dead_processes()
        raise SystemExit("Ray waits itself")
"""
FAKE_SERVICES = """
calls = 0
RAY_PATH = "/x y"

def get_node(gcs_address, node_id):
    global calls
    calls += 1
    if calls < 5:
        raise RuntimeError(f"no {node_id} at {gcs_address}")
    return calls

def start_ray_process(command, process_type, fate_share):
    return " ".join([process_type, *command, str(fate_share)])
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
        "ray/_private/services.py": FAKE_SERVICES,
        "ray/scripts/__init__.py": "",
        "ray/scripts/scripts.py": FAKE_SCRIPTS,
        "grpc.py": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def started(fake_ray, *more, **environment):
    words = [sys.executable, start_node.__file__, "start", "--block", *more]
    environment = {**os.environ, "PYTHONPATH": str(fake_ray), **environment}
    return subprocess.run(
        words, capture_output=True, text=True, check=False, env=environment, timeout=570
    )


def test_no_server_is_started_that_nobody_asks(fake_ray):
    done = started(fake_ray)
    assert done.stdout.splitlines()[0] == "['start', '--block'] None None", done.stderr


def test_a_raylet_is_told_its_agents_port(fake_ray):
    """It would ask for it, and give up after 15 s."""
    done = started(fake_ray, "--dashboard-agent-listen-port=5123", "--runtime-env-agent-port=5")
    of_raylet, of_head = done.stdout.splitlines()[2:]
    assert of_raylet.endswith("--minimal --dashboard_agent_listen_port=5123 True"), done.stderr
    assert of_head.endswith("--minimal True")


def test_a_raylet_starts_the_small_agent(fake_ray):
    small = subprocess.list2cmdline([str(Path(start_node.__file__).with_name("start_agent.py"))])
    of_raylet, of_head = started(fake_ray, "--one", "--other").stdout.splitlines()[2:]
    assert of_raylet == f"raylet raylet --dashboard_agent_command=python -u {small} --minimal True"
    assert '"/x y/dashboard/agent.py"' in of_head  # of nobody else's command


def test_the_small_agent_is_rays_with_none_of_its_modules(fake_ray):
    folder = fake_ray / "ray" / "dashboard"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "utils.py").write_text("def get_all_modules(kind):\n    raise SystemExit('all')\n")
    (folder / "agent.py").write_text(
        "import sys\nimport ray.dashboard.utils as utils\n"
        "print(__name__, sys.argv[1:], utils.get_all_modules('agent'))\n"
    )
    words = [sys.executable, start_agent.__file__, "--minimal"]
    environment = {**os.environ, "PYTHONPATH": str(fake_ray)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout == "__main__ ['--minimal'] []\n", done.stderr


def test_a_raylet_is_waited_for_as_long_as_ray_is_told(fake_ray):
    """Ray itself asks a node's first raylet for 30 s, whatever it is told."""
    assert started(fake_ray).stdout.splitlines()[-1] == "5"
    done = started(fake_ray, RAY_raylet_start_wait_time_s="0")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "not up after 0 s" in last and "no node at address" in last


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Ray waits itself")
def test_what_waits_is_small_and_ends_with_the_first_of_rays_processes(fake_ray):
    done = started(fake_ray, "wait")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-1] == "5"  # Ray was up before


def test_ray_has_what_is_left_out_and_asks_for_its_raylet_where_it_is_waited_for():
    """Otherwise a newer Ray starts its web server again, and nobody notices."""
    node = pytest.importorskip("ray._private.node", reason="pip install 'megatron-hdp[ray]'")
    assert callable(node.Node.start_api_server)
    scripts = pytest.importorskip("ray.scripts.scripts")
    assert "deceased = node.dead_processes()" in inspect.getsource(scripts)
    assert "services.get_node(" in inspect.getsource(node.Node.__init__)
    services = node.ray._private.services
    parameters = inspect.signature(services.get_node).parameters
    assert list(parameters) == ["gcs_address", "node_id"]
    assert Path(services.RAY_PATH, "dashboard", "agent.py").is_file()
    assert 'os.path.join(RAY_PATH, "dashboard", "agent.py")' in inspect.getsource(services)
    agent = Path(services.RAY_PATH, "dashboard", "agent.py").read_text()
    assert "dashboard_utils.get_all_modules(" in agent
