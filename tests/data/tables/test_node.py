"""Processes of a node share one file: built once, also where the one that builds is killed."""

import json
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp import files
from tests.data.tables.pairs import everything, open_table, write_pair

ROOT = Path(__file__).parents[3]


@pytest.fixture
def said(tmp_path):
    """What `opener` is told."""
    prefix = write_pair(tmp_path / "data", [[n % 9 + 1] for n in range(2_000)])
    names = {"folder": tmp_path / "caches", "log": tmp_path / "log", "start": tmp_path / "start"}
    return {"prefix": prefix} | {name: str(path) for name, path in names.items()}


def start(stack, said):
    """An opener that has said it is ready."""
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-m", "tests.data.tables.opener", json.dumps(said)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
    )
    stack.callback(process.kill)
    assert process.stdout.readline() == "ready\n"
    return process


def test_processes_at_once_build_once(said):
    with ExitStack() as stack:
        openers = [start(stack, said) for _ in range(4)]
        Path(said["start"]).touch()
        found = {opener.communicate(timeout=240)[0] for opener in openers}
    assert len(found) == 1 and len(found.pop()) == 65
    assert Path(said["log"]).read_text() == "built\n"


def test_processes_without_a_lock_build_more_than_once(said):
    """So the test above can fail."""
    with ExitStack() as stack:
        openers = [start(stack, said | {"unlocked": True}) for _ in range(3)]
        Path(said["start"]).touch()
        for opener in openers:
            opener.communicate(timeout=240)
    assert Path(said["log"]).read_text().count("built\n") > 1


def test_whoever_waits_builds_when_the_builder_is_killed(said, monkeypatch):
    monkeypatch.setattr(files, "SAY_AFTER_S", 0.0)
    Path(said["start"]).touch()
    folder, lines, tables = Path(said["folder"]), [], []
    is_waiting = threading.Event()

    def say(line):
        lines.append(line)
        is_waiting.set()

    def wait():
        tables.append(open_table(said["prefix"], max_length=9, cache_folder=folder, say=say))

    with ExitStack() as stack:
        builder = start(stack, said | {"stall": True})
        assert builder.stdout.readline() == "stalled\n"
        waiter = threading.Thread(target=wait)
        waiter.start()
        assert is_waiting.wait(240)
        assert not list(folder.glob("*.table"))
        (left,) = folder.glob("*.table.*")
        os.kill(builder.pid, signal.SIGKILL)
        waiter.join(240)
    assert f"waiting for process {builder.pid} on " in lines[0]
    assert not left.exists()
    assert everything(tables[0]) == everything(open_table(said["prefix"], max_length=9))
    assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".table"]


def private_bytes():
    """Memory of this process that is no page of a file."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(rollup.split("Anonymous:")[1].split()[0])


def growth(prefix, folder):
    """Private memory of a table opened and used, its size, and memory of an array of 64 MB."""
    rows = np.random.default_rng(0).integers(0, 1_500_000, 60_000)
    before = private_bytes()
    table = open_table(prefix, max_length=99, cache_folder=folder)
    assert table.lengths(rows).sum() and table.begins(rows).sum()
    added = private_bytes() - before
    before, fresh = private_bytes(), np.ones(8_000_000)
    return added, table.num_bytes, private_bytes() - before, len(fresh)


def test_nothing_private_grows_with_the_corpus(tmp_path):
    """In processes of their own: here, memory that earlier tests left would be used again."""
    prefix = tmp_path / "data"
    write_big_pair(prefix, 1_500_000)
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for folder in (tmp_path, tmp_path, None):  # the second one finds it there
            added, num_bytes, of_array, _ = processes.submit(growth, prefix, folder).result(570)
            assert of_array > 60e6  # else nothing was measured
            assert added < 5e6 if folder else added > 15e6
            assert num_bytes > 15e6


def test_a_table_is_built_in_little_memory(tmp_path):
    prefix = tmp_path / "data"
    write_big_pair(prefix, 1_500_000)
    tracemalloc.start()
    open_table(prefix, max_length=99, cache_folder=tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6  # the .idx has 30 MB


def write_big_pair(prefix, num_documents):
    """An ``.idx`` of documents of 1 to 90 tokens, and a ``.bin`` of holes."""
    lengths = np.random.default_rng(1).integers(1, 91, num_documents, dtype="<i4")
    pointers = 2 * (np.cumsum(lengths, dtype="<i8") - lengths)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + b"\x08")
        for count in (num_documents, num_documents + 1):
            file.write(count.to_bytes(8, "little"))
        for column in (lengths, pointers, np.arange(num_documents + 1)):
            column.tofile(file)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * int(lengths.sum()))
