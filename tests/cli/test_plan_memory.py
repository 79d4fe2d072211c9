"""``megatron-hdp plan`` on ten million sequences: what the whole process takes of memory."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

_NUM_SEQUENCES = 10_000_000
_MOST_BYTES = 600_000_000
_TIMEOUT_S = 300  # on a quiet machine it takes less than 15


def lognormal() -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(7, 1.5, _NUM_SEQUENCES).astype(np.int64) + 1
    return drawn.clip(max=2**20)


def equal() -> np.ndarray:
    return np.full(_NUM_SEQUENCES, 1000)


_MEASURE = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(usage.ru_maxrss * 1024)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def peak_bytes(*arguments: str) -> int:
    """The peak resident memory of a ``megatron-hdp`` command that succeeds.

    A small process starts it: Linux counts to a program what the process held that became it.
    """
    command = [sys.executable, "-m", "megatron_hdp.cli.main", *arguments]
    measure = [sys.executable, "-c", _MEASURE, *command]
    done = subprocess.run(
        measure, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, check=True
    )
    return int(done.stdout)


def test_what_this_process_holds_is_not_counted() -> None:
    held = np.ones(_MOST_BYTES // 16)
    assert peak_bytes("--version") < held.nbytes // 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "ranks", "tokens_per_rank"),
    [(lognormal, 1024, 8192), (equal, 1024, 1024)],
    ids=["rings", "ten million micro-batches"],
)
def test_ten_million_sequences(tmp_path: Path, lengths, ranks, tokens_per_rank) -> None:
    path = tmp_path / "lengths.txt"
    np.savetxt(path, lengths(), fmt="%d")
    peak = peak_bytes(
        *("plan", "--lengths", str(path)),
        *("--ranks", str(ranks), "--tokens-per-rank", str(tokens_per_rank)),
    )
    assert peak <= _MOST_BYTES
