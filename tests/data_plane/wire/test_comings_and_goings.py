"""A thousand ranks that come, map a step and are killed leave nothing behind."""

import gc
import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_hdp.data_plane.wire import NodeServer, SegmentFolder
from tests.support.node import until

REPOSITORY = Path(__file__).parents[3]
AT_ONCE = 16


class Segments:
    """Gives every client a segment and takes it back when the client is gone."""

    def __init__(self, folder, forgets=0):
        self._folder, self._forgets = folder, forgets
        self._numbers = itertools.count()
        self.num_gone = self.most_bytes = 0

    def __call__(self, client, request):
        kind = request["request"]
        if kind == "hello":
            client.facts["segments"] = []
        elif kind == "wait":
            time.sleep(0.2)  # longer than the rank lives
        elif kind == "get":
            name = f"step-{next(self._numbers)}"
            with self._folder.create(name, 4096) as buffer:
                buffer[:8] = request["rank"].to_bytes(8, "little")
            client.facts["segments"].append(name)
            self.most_bytes = max(self.most_bytes, self._folder.num_bytes)
            return {"segment": name}
        return {}

    def gone(self, client):
        self.num_gone += 1
        if self.num_gone <= self._forgets:
            return
        for name in client.facts.pop("segments", ()):
            self._folder.remove(name)


def what_is_held(folder):
    """Return threads, descriptors, maps of segments and files."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    files = sorted(path.name for path in folder.path.iterdir())
    descriptors = len(os.listdir("/proc/self/fd"))
    return set(threading.enumerate()), descriptors, maps.count(str(folder.path)), files


@pytest.mark.parametrize(
    ("num_ranks", "forgets"), [(90, 0), (30, 3), pytest.param(1000, 0, marks=pytest.mark.slow)]
)
def test_ranks_that_are_killed_leave_nothing_behind(tmp_path, num_ranks, forgets):
    folder = SegmentFolder.make("steps", tmp_path)
    socket_path = folder.path / "node.sock"
    handler = Segments(folder, forgets)
    server = NodeServer(socket_path, handler)
    before = what_is_held(folder)
    arguments = [str(socket_path), str(folder.path), str(num_ranks), str(AT_ONCE)]
    script = [sys.executable, "-m", "tests.support.node_clients", *arguments]
    done = subprocess.run(script, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    third = num_ranks // 3
    assert done.stdout.splitlines() == [
        f"{num_ranks - 2 * third} of {num_ranks}: ends, 0",
        f"{third} of {num_ranks}: is killed, -9",
        f"{third} of {num_ranks}: is killed while it waits, -9",
    ] or pytest.fail(done.stdout + done.stderr)
    until(lambda: not server.clients, 10.0)
    assert handler.num_gone == num_ranks
    # each has two; on a busy machine later ones come before the node has noticed who is gone
    assert 4096 <= handler.most_bytes < 2 * num_ranks * 4096
    after = what_is_held(folder)
    if forgets:  # the same measure finds what a handler does not release
        assert len(after[3]) == len(before[3]) + forgets
    else:  # what other tests left may end meanwhile
        assert after[0] <= before[0] and after[1] <= before[1]
        assert after[2:] == before[2:]
    server.close()
    folder.close()
    assert not folder.path.exists()
