"""A real plane starts where names are long and the machine is slow."""

import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megatron_hdp.data_plane.cluster import job_folder as folders
from tests.support.plane import running_plane
from tests.support.thread_plane import write_pairs

pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")
pytestmark = pytest.mark.slow

RAYS_PATIENCE_S = 30


@pytest.mark.parametrize("num_bytes", [folders._LONGEST_PARENT, 100])
def test_a_long_folder_for_temporary_files(tmp_path, monkeypatch, temporary, num_bytes):
    """The longest that Ray can have its sockets in is taken, of a longer one /tmp instead."""
    long = temporary / ("x" * (num_bytes - len(f"{temporary}/")))
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    with running_plane(write_pairs(tmp_path), timeout_s=240) as plane:
        for _ in range(3):
            plane.step()
        names = [str(one) for one in long.rglob("*") if one.is_socket()]
        if num_bytes == 100:
            assert plane.folder.parent == Path("/tmp") and names == []
        else:
            assert plane.folder.parent == long
            assert len(names) > 2 and max(map(len, names)) <= 107, names
    assert list(long.iterdir()) == []


def test_a_raylet_that_is_slow_is_waited_for(tmp_path):
    """It stands still for longer than ``ray start`` waits by itself."""
    stopped = []

    def hold():
        deadline = time.monotonic() + 120
        while not stopped and time.monotonic() < deadline:
            for one in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if one.name() == "raylet":
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
