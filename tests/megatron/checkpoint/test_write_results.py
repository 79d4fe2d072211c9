"""A writer's report reaches its rank, and nothing of it is left, however the rank ends."""

import gc
import multiprocessing
import os
import pickle
import queue
import signal
import tempfile

import pytest

from megatron_hdp.megatron.checkpoint.write_results import ReportFile
from tests.support.ranks import _server_environment

ITEM = (3, OSError(28, "No space left on device"), b"x" * 300_000)


def put(report):
    report.put(ITEM)


@pytest.mark.parametrize(("method", "times"), [("fork", 2), ("forkserver", 1)])
def test_a_report_is_taken_once(method, times):
    report = ReportFile()
    for _ in range(times):
        with pytest.raises(queue.Empty):
            report.get_nowait()
        process = multiprocessing.get_context(method).Process(target=put, args=(report,))
        with _server_environment():  # spawning would import this file anew
            process.start()
        process.join(570)
        rank, error, rest = report.get_nowait()
        assert (rank, str(error), rest) == (3, str(ITEM[1]), ITEM[2])
    with pytest.raises(queue.Empty):
        report.get_nowait()


def test_half_a_report_is_none():
    report = ReportFile()
    report.put(ITEM)
    os.ftruncate(report._memory.descriptor, 100)
    with pytest.raises(queue.Empty):
        report.get_nowait()


def test_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    report = ReportFile()
    descriptor = report._memory.descriptor
    again = pickle.loads(pickle.dumps(report))
    again.put(ITEM)
    del again
    assert report.get_nowait()[0] == 3
    del report
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(descriptor)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="a temporary file outlives a kill")
def test_nothing_is_left_of_a_process_that_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    child = os.fork()
    if child == 0:
        ReportFile().put(ITEM)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert os.listdir(tmp_path) == []
