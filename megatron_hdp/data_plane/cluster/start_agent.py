"""``python start_agent.py ...``: the agent that a raylet needs, without what it could do.

It would import 20 MB of the dashboard, for metrics, logs and jobs that nothing here asks for.
"""

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run Ray's agent with the words of this process."""
    from ray.dashboard import utils

    utils.get_all_modules = lambda kind: []
    runpy.run_path(str(Path(utils.__file__).with_name("agent.py")), run_name="__main__")


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose files are no modules of their own
    main()
