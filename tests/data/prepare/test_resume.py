"""Killed at any time, nothing half is taken for whole, and the next run goes on."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_hdp.data.prepare import cache
from tests.data.prepare.corpora import (
    as_bytes,
    documents,
    names,
    pair,
    run,
    texts_of,
    write_lines,
)

REPOSITORY = Path(__file__).parents[3]
ALONGSIDE = """
import sys
from tests.data.prepare.corpora import run
said = []
run(sys.argv[1], sys.argv[2], workers=1, said=said)
print(sum("prepares" in line for line in said))
"""
PROGRAM = """
import sys, time
from megatron_hdp.data.prepare import shard_run, tokenising
from tests.data.prepare.corpora import run

slow = shard_run.run_shard
def run_shard(decoding, shard, prefix, tell):
    time.sleep(0.02)
    return slow(decoding, shard, prefix, tell)
tokenising.run_shard = run_shard
if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], workers=int(sys.argv[3]))
"""


@pytest.fixture
def corpus(tmp_path):
    return write_lines(tmp_path / "source" / "x.jsonl", texts_of(400))


def marks(folder):
    return len(list(Path(folder).glob("*.work/0*.json")))


def wait_for(condition, deadline_s=240.0):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def start(corpus, folder, workers):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(corpus), str(folder), str(workers)],
        cwd=REPOSITORY,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_is_continued(corpus, tmp_path, workers):
    folder = tmp_path / "cache"
    process = start(corpus, folder, workers)
    wait_for(lambda: marks(folder) >= 3)
    below = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    assert len(below) == workers
    psutil.wait_procs(below, timeout=120)
    assert not any(child.is_running() for child in below)
    finished = marks(folder)
    assert not list(folder.glob("*.idx"))
    said = []
    found = run(corpus, folder, said=said)
    assert "the others were finished before" in said[0]
    left, total = (int(part.split()[-1]) for part in said[0].split(" shards")[0].split(" of "))
    assert total - left == finished >= 3
    assert documents(found.prefix) == as_bytes(texts_of(400))
    assert pair(found.prefix) == pair(run(corpus, tmp_path / "other").prefix)
    assert [Path(name).suffix for name in names(folder)] == [
        *(".bin", ".idx", ".json", ".lock", ".sums")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_run_that_is_killed_again_and_again(corpus, tmp_path, seed):
    draw = random.Random(seed)
    for _ in range(40):
        process = start(corpus, tmp_path / "cache", draw.choice([0, 1, 3]))
        try:
            process.wait(timeout=draw.uniform(0.3, 1.5))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        else:
            break
    found = run(corpus, tmp_path / "cache")
    assert documents(found.prefix) == as_bytes(texts_of(400))


@pytest.mark.parametrize("step", ["join", "finish"])
def test_a_failure_at_the_end_keeps_the_shards(corpus, tmp_path, monkeypatch, step):
    def fail(*arguments, **more):
        raise OSError(28, "No space left on device", str(tmp_path / "cache"))

    target = cache if step == "join" else cache.PreparedFiles
    monkeypatch.setattr(target, step, fail)
    with pytest.raises(OSError, match="No space left"):
        run(corpus, tmp_path / "cache")
    monkeypatch.undo()
    assert not [name for name in names(tmp_path / "cache") if name.endswith(".json")]
    said = []
    run(corpus, tmp_path / "cache", said=said)
    assert "prepares" in said[0] and ": prepares" in said[0] and " 0 of " in said[0]


def test_what_a_killed_run_left_half_is_removed(corpus, tmp_path):
    folder = tmp_path / "cache"
    found = run(corpus, folder)
    whole = pair(found.prefix)
    os.remove(found.manifest)
    work = Path(found.prefix + ".work")
    work.mkdir()
    for left in (
        f"{found.prefix}.tmp12.bin",
        f"{found.prefix}.spans.tmp1",
        f"{work}/000001.tmp9.idx",
    ):
        Path(left).write_bytes(b"half")
    (work / "000000.json").write_bytes(b"")  # a crash of the machine emptied it
    (work / "000001.json").write_text('{"fingerprint": "of another cut", "counts": {}}')
    assert run(corpus, folder) == found
    assert pair(found.prefix) == whole
    assert len(names(folder)) == 5


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_full_disk(tmp_path, workers):
    corpus = write_lines(tmp_path / "source" / "x.jsonl", [text * 1000 for text in texts_of(10)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large.*web-") as caught:
            run(corpus, tmp_path / "cache", workers=workers, shard_bytes=10**6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("*.bin"))
    assert not list((tmp_path / "cache").glob("**/*tmp*"))
    assert run(corpus, tmp_path / "cache").documents == 10


def test_an_interrupt_ends_the_workers(corpus, tmp_path):
    process = start(corpus, tmp_path / "cache", 2)
    wait_for(lambda: marks(tmp_path / "cache") >= 2)
    below = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    process.wait(timeout=240)
    psutil.wait_procs(below, timeout=120)
    assert len(below) == 2 and not any(child.is_running() for child in below)
    assert not list((tmp_path / "cache").glob("*.idx"))
    assert run(corpus, tmp_path / "cache").documents == 400


def test_processes_at_the_same_time_make_it_once(tmp_path):
    corpus = write_lines(tmp_path / "x.jsonl", texts_of(300))
    command = [sys.executable, "-c", ALONGSIDE, str(corpus), str(tmp_path / "cache")]
    processes = [
        subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    printed = [process.communicate(timeout=240)[0] for process in processes]
    assert sorted(map(int, printed)) == [0, 0, 1]
    assert len(documents(run(corpus, tmp_path / "cache").prefix)) == 300
    assert len(names(tmp_path / "cache")) == 5
