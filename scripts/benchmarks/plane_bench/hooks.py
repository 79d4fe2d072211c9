"""What measurements put into processes that read tokens; see `megatron_hdp.data_plane.hooks`.

Each function reads its figure from the environment, because Ray starts the processes.
"""

import os
import time

import numpy as np

from megatron_hdp.data.mixture import TableSource

STATE_MB = "PLANE_BENCH_STATE_MB"
"""What a source's reader holds once it has read."""
TOKEN_US = "PLANE_BENCH_TOKEN_US"
"""What preprocessing takes for a token, in microseconds."""

_read = TableSource.tokens
_states: dict[str, object] = {}


def hold_state() -> None:
    """Hold memory for each source whose tokens this process has read."""
    num_bytes = int(float(os.environ[STATE_MB]) * 2**20)

    def tokens(self, row, start, count):  # type: ignore[no-untyped-def]
        if self.name not in _states:
            _states[self.name] = np.ones(num_bytes, dtype=np.uint8)
        return _read(self, row, start, count)

    TableSource.tokens = tokens


def take_time() -> None:
    """Take time for each token that is read."""
    token_s = float(os.environ[TOKEN_US]) * 1e-6

    def tokens(self, row, start, count):  # type: ignore[no-untyped-def]
        time.sleep(token_s * count)
        return _read(self, row, start, count)

    TableSource.tokens = tokens
