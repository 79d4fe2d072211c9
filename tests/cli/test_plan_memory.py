"""``megatron-hdp plan`` on ten million sequences: what the whole process takes of memory."""

import os
import subprocess
import sys
import threading
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


def peak_bytes(*arguments: str) -> int:
    """The peak resident memory of a ``megatron-hdp`` command that succeeds."""
    command = [sys.executable, "-m", "megatron_hdp.cli.main", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    killer = threading.Timer(_TIMEOUT_S, process.kill)
    killer.start()
    _, status, usage = os.wait4(process.pid, 0)
    killer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss * 1024


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
