"""``python start_node.py start ...``: ``ray start`` without unused servers, patient, then small.

A head would also run Ray's client server, where grpcio is installed, and its web server, even with
the dashboard off: about 60 MB each, and seconds of every start. Nothing here uses them.

Once all is up, `ray start` only waits: on Linux a small program does that in its place, which saves
45 MB. Soon after one of Ray's processes it ends, and the kernel kills those that it has started.

The raylet is told its agent's port, which ``ray start`` tells the agent alone: a raylet that has to
ask gives up after 15 s, and on a busy machine an agent's imports take longer. The agent is
`start_agent`'s, a small one.

It gets as long to come up as Ray's own variable `_WAIT` says. ``ray start`` ignores it:
after 30 s it would end all that it started.
"""

import os
import subprocess
import sys
import time
from typing import Any

_WAIT = "RAY_raylet_start_wait_time_s"
_AGENT_PORT, _ITS_FLAG = "--dashboard-agent-listen-port=", "--dashboard_agent_listen_port="
_AGENT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "start_agent.py")
_PAUSE_S = 0.1
_WAITING = "import os, time; os.wait(); time.sleep(1); os._exit(1)"  # who watches tells which


def main() -> None:
    """Run Ray's command line with the words of this process."""
    sys.modules["grpc"] = None  # type: ignore[assignment]  # the client server's: as not installed
    from ray._private import services
    from ray._private.node import Node
    from ray.scripts import scripts

    Node.start_api_server = _no_server
    if sys.platform == "linux":
        Node.dead_processes = _wait_small
    services.get_node = _patient(services.get_node)
    agent = os.path.join(services.RAY_PATH, "dashboard", "agent.py")
    services.start_ray_process = _telling(services.start_ray_process, agent)
    scripts.main()


def _patient(get_node: Any) -> Any:
    """Return what asks for a node until it is there: for that which Ray has just started."""

    def patient(gcs_address: str, node_id: str) -> Any:
        deadline = time.monotonic() + float(os.environ.get(_WAIT, "30"))
        while True:
            try:
                return get_node(gcs_address, node_id)
            except RuntimeError as error:  # it is not there yet
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"Ray on this node is not up after {os.environ.get(_WAIT, '30')} s "
                        f"({error}): look at the machine's load and at Ray's logs, or raise "
                        f"timeout-s of loaders"
                    ) from None
            time.sleep(_PAUSE_S)

    return patient


def _telling(start: Any, agent: str) -> Any:
    """Return what starts a process of Ray, and tells a raylet its agent and that one's port."""

    def telling(command: list[str], process_type: str, *more: Any, **named: Any) -> Any:
        if process_type == "raylet":
            told = [one for one in sys.argv if one.startswith(_AGENT_PORT)]
            command = [one.replace(_word(agent), _word(_AGENT)) for one in command]
            command += [one.replace(_AGENT_PORT, _ITS_FLAG) for one in told]
        return start(command, process_type, *more, **named)

    return telling


def _word(path: str) -> str:
    """As it stands in a command that a raylet is told."""
    return subprocess.list2cmdline([path])


def _no_server(node: Any, **options: Any) -> None:
    """Leave the node as Ray does when its web server does not start, which it tolerates."""
    node._webui_url = None


def _wait_small(node: Any) -> None:
    """Become what waits; Ray asks here, again and again, which of its processes have ended."""
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", _WAITING])


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose files are no modules of their own
    main()
