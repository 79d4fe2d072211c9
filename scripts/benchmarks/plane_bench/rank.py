"""A rank without torch: asks for steps, one after another; started by `common.RankProcess`.

It says a line when it is ready, waits for a word, runs, says what it found, and waits for the end.
"""

import json
import sys
import time
from pathlib import Path

from plane_bench.common import digest, planner_of

from megatron_hdp.data.mixture import Position
from megatron_hdp.data.steps import LocalLoaders, Reader
from megatron_hdp.data_plane.hooks import run_hook
from megatron_hdp.data_plane.loaders import RayLoaders
from megatron_hdp.data_plane.records import from_plain
from megatron_hdp.data_plane.setup import SplitSetup


def main() -> None:
    """Run what the only argument tells."""
    work = json.loads(sys.argv[1])
    run_hook()
    setup = from_plain(SplitSetup, work["setup"])
    reader = from_plain(Reader, work["reader"])
    print(json.dumps({"ready": True}), flush=True)
    sys.stdin.readline()
    if work["socket"] is None:
        loaders = LocalLoaders(planner_of(setup), reader)
    else:
        loaders = RayLoaders(Path(work["socket"]), setup, reader)
    position, waits, digests = Position(), [], []
    loaders.expect(position)
    for _ in range(work["steps"]):
        began = time.perf_counter()
        step = loaders.get(position)
        waits.append(time.perf_counter() - began)
        position = step.totals.after
        loaders.expect(position)
        digests.append(digest(step))
        time.sleep(work.get("pause_s", 0.0))
    print(json.dumps({"waits_s": waits, "digests": digests}), flush=True)
    sys.stdin.readline()  # while others look at its memory
    loaders.close()


if __name__ == "__main__":
    main()
