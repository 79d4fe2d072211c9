"""``python start_node.py start ...``: ``ray start`` without servers that nobody asks.

A head would also run Ray's client server, where grpcio is installed, and its web server, even with
the dashboard off: about 60 MB each, and seconds of every start. Nothing here talks to them.
"""

import sys
from typing import Any


def main() -> None:
    """Run Ray's command line with the words of this process."""
    sys.modules["grpc"] = None  # type: ignore[assignment]  # the client server's: as not installed
    from ray._private.node import Node
    from ray.scripts import scripts

    Node.start_api_server = _no_server
    scripts.main()


def _no_server(node: Any, **options: Any) -> None:
    """Leave the node as Ray does when its web server does not start, which it tolerates."""
    node._webui_url = None


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose files are no modules of their own
    main()
