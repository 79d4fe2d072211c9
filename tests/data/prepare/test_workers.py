"""Workers are fresh interpreters that end with their parent; what goes wrong in them is told."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megatron_hdp.data.prepare import Decoding
from megatron_hdp.data.prepare.shards import cut
from megatron_hdp.data.prepare.workers import run_by_workers
from megatron_hdp.data.tokenizers import ByteTokenizer
from tests.data.prepare.corpora import texts_of, write_lines

REPOSITORY = Path(__file__).parents[3]
DECODING = Decoding(tokenizer=ByteTokenizer(), key="text")


class Odd(ByteTokenizer):
    """A tokenizer that does in a worker what its tests want."""

    def __init__(self, action):
        self.action = action

    def tokenize_batch(self, documents):
        if self.action == "die":
            os.kill(os.getpid(), 9)
        if self.action == "leave":
            os._exit(3)
        if self.action == "break":
            raise ZeroDivisionError("a defect")
        if self.action == "miss":
            raise ImportError("a package is missing")
        if self.action == "say":
            report = {
                "torch": "torch" in sys.modules,
                "parallel": os.environ["TOKENIZERS_PARALLELISM"],
                "threads": os.environ["RAYON_NUM_THREADS"],
                "blas": os.environ["OPENBLAS_NUM_THREADS"],
                "main": getattr(sys.modules["__main__"], "__file__", None),
            }
            raise ValueError(str(report))
        return super().tokenize_batch(documents)


def workers_of(process):
    return [child for child in process.children() if "prepare.workers" in " ".join(child.cmdline())]


def tasks_of(tmp_path, num=40):
    path = write_lines(tmp_path / "x.jsonl", texts_of(num))
    shards = cut([str(path)], "text", lines=False, shard_bytes=1000)
    return [(shard, str(tmp_path / f"{shard.index}")) for shard in shards]


def run(tmp_path, decoding=DECODING, workers=2):
    told = []
    results = run_by_workers(decoding, workers, tasks_of(tmp_path), told.append)
    return {shard.index: counts for shard, counts in results}, sum(told)


def test_all_shards_are_run_and_progress_is_told(tmp_path):
    found, told = run(tmp_path)
    assert sorted(found) == list(range(len(found))) and len(found) > 5
    assert sum(counts.documents for counts in found.values()) == 40
    assert told == (tmp_path / "x.jsonl").stat().st_size


@pytest.mark.parametrize(
    ("action", "kind", "expected"),
    [
        ("die", ChildProcessError, "ended by signal 9 while it read .*x.jsonl.*fewer workers"),
        ("leave", ChildProcessError, "ended with exit code 3 while it read"),
        ("break", RuntimeError, "(?s)x.jsonl:.*ZeroDivisionError: a defect"),
        ("miss", ImportError, "^a package is missing$"),
    ],
)
def test_what_goes_wrong_is_told(tmp_path, action, kind, expected):
    with pytest.raises(kind, match=expected):
        run(tmp_path, replace(DECODING, tokenizer=Odd(action)))
    assert workers_of(psutil.Process()) == []


def test_workers_are_lean_and_share_the_cpus(tmp_path, monkeypatch):
    import torch  # as in a rank

    assert torch.zeros(1).item() == 0
    monkeypatch.setattr("megatron_hdp.data.prepare.workers.available_cpus", lambda: 8)
    for variable in ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    decoding = replace(DECODING, tokenizer=Odd("say"))
    with pytest.raises(ValueError) as caught:
        run(tmp_path, decoding, workers=2)
    report = {"torch": False, "parallel": "true", "threads": "4", "blas": "1", "main": None}
    assert eval(str(caught.value)) == report
    monkeypatch.setattr("megatron_hdp.data.prepare.workers.available_cpus", lambda: 1)
    with pytest.raises(ValueError, match="'parallel': 'false', 'threads': '1'"):
        run(tmp_path, decoding, workers=1)
    monkeypatch.setenv("RAYON_NUM_THREADS", "3")
    with pytest.raises(ValueError, match="'threads': '3'"):
        run(tmp_path, decoding, workers=1)


def test_workers_end_when_the_caller_stops_listening(tmp_path):
    results = run_by_workers(DECODING, 2, tasks_of(tmp_path), lambda count: None)
    next(results)
    assert len(workers_of(psutil.Process())) == 2
    results.close()
    assert workers_of(psutil.Process()) == []


def test_workers_end_with_their_parent(tmp_path):
    program = (
        "import time; from megatron_hdp.data.prepare.workers import started; "
        "from tests.data.prepare.test_workers import DECODING; "
        "workers = started(DECODING, 2); workers.__enter__(); "
        "print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    below = workers_of(psutil.Process(process.pid))
    time.sleep(0.1)
    process.kill()
    process.wait()
    process.stdout.close()
    assert len(below) == 2
    assert psutil.wait_procs(below, timeout=120)[1] == []
