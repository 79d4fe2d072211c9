"""A real plane starts where names are long and the machine is slow."""

import os
import signal
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megatron_hdp.data_plane.cluster import job_folder as folders
from tests.support.plane import running_plane
from tests.support.thread_plane import write_pairs

pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")
pytestmark = pytest.mark.slow

RAYS_PATIENCE_S = 30


@contextmanager
def temporary_folder(monkeypatch, num_bytes):
    """A folder for temporary files whose name has so many bytes."""
    parent = tempfile.mkdtemp(prefix="t", dir="/tmp")
    whole = Path(parent, "x" * (num_bytes - len(parent) - 1))
    whole.mkdir()
    monkeypatch.setenv("TMPDIR", str(whole))
    monkeypatch.setattr(tempfile, "tempdir", None)
    try:
        yield whole
        assert list(whole.iterdir()) == []
    finally:
        whole.rmdir()
        os.rmdir(parent)


def sockets_below(parent):
    return [one for one in Path(parent).rglob("*") if one.is_socket()]


@pytest.mark.parametrize("num_bytes", [folders._LONGEST_PARENT, 100])
def test_a_long_folder_for_temporary_files(tmp_path, monkeypatch, num_bytes):
    """The longest that Ray can have its sockets in is taken, of a longer one /tmp instead."""
    path = write_pairs(tmp_path)
    with (
        temporary_folder(monkeypatch, num_bytes) as long,
        running_plane(path, timeout_s=240) as plane,
    ):
        for _ in range(3):
            plane.step()
        if num_bytes == 100:
            assert plane.folder.parent == Path("/tmp")
            return
        names = [os.fspath(one) for one in sockets_below(long)]
        assert plane.folder.parent == long
        assert len(names) > 2 and max(map(len, names)) <= 107, names


def test_a_raylet_that_is_slow_is_waited_for(tmp_path):
    """It stands still for longer than ``ray start`` waits by itself."""
    stopped = []

    def hold():
        deadline = time.monotonic() + 120
        while not stopped and time.monotonic() < deadline:
            for one in psutil.Process().children(recursive=True):
                if process_name(one) == "raylet":
                    one.send_signal(signal.SIGSTOP)
                    stopped.append(one)
            time.sleep(0.01)
        time.sleep(RAYS_PATIENCE_S + 10)
        for one in stopped:
            one.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        began = time.monotonic()
        with running_plane(write_pairs(tmp_path), timeout_s=240) as plane:
            plane.step()
            assert stopped and time.monotonic() - began > RAYS_PATIENCE_S
            plane.step()
    finally:
        thread.join()


def process_name(process):
    try:
        return process.name()
    except psutil.Error:
        return ""
