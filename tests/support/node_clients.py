"""Ranks that come and go, one process each: ``node_clients.py SOCKET FOLDER NUM AT_ONCE``.

Every rank says hello, gets a segment, maps it and reads it. A third of them is killed with it
mapped, a third while it waits for the next answer; the rest just ends. Prints how many ended how.
"""

import os
import signal
import sys
from collections import Counter
from pathlib import Path

from megatron_hdp.data_plane.wire import NodeClient, SegmentFolder

_WAY = ("ends", "is killed", "is killed while it waits")
_TIMEOUT_S = 60.0


def live(rank: int, path: Path, folder: SegmentFolder) -> None:
    """What a rank does until it ends."""
    client = NodeClient(path, hello={"request": "hello", "rank": rank})
    client.open(_TIMEOUT_S)
    answer = client.call({"request": "get", "rank": rank}, _TIMEOUT_S)
    mapped = folder.attach(answer["segment"])
    assert mapped[:8] == rank.to_bytes(8, "little"), (rank, mapped[:8])
    mapped[:8] = bytes(8)  # its own copy
    if rank % 3 == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank % 3 == 2:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        client.call({"request": "wait"}, _TIMEOUT_S)


def main(path: Path, folder: Path, num_ranks: int, at_once: int) -> None:
    """Start them and count their ends."""
    segments = SegmentFolder(folder)
    ends: Counter[tuple[str, int]] = Counter()
    running: dict[int, int] = {}
    for rank in range(num_ranks + at_once):
        if len(running) >= at_once or rank >= num_ranks:
            if not running:
                break
            pid, status = os.wait()
            ends[_WAY[running.pop(pid) % 3], os.waitstatus_to_exitcode(status)] += 1
        if rank < num_ranks:
            pid = os.fork()
            if not pid:
                try:
                    live(rank, path, segments)
                    os._exit(0)
                finally:
                    sys.excepthook(*sys.exc_info())
                    os._exit(1)
            running[pid] = rank
    for (way, code), count in sorted(ends.items()):
        print(f"{count} of {num_ranks}: {way}, {code}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
