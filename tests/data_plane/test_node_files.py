"""A node's status: whole at any time, its user's alone."""

import os
import stat
import threading
import time

from megatron_hdp.data_plane.node_files import read_status, write_status


def test_there_is_none_before_the_first(tmp_path):
    assert read_status(tmp_path) is None
    assert read_status(tmp_path / "gone") is None


def test_what_is_written_is_read(tmp_path):
    before = time.time()
    write_status(tmp_path, {"plane": "p", "node": 0, "long": "x" * 1000})
    write_status(tmp_path, {"plane": "p", "node": 1})
    found = read_status(tmp_path)
    assert before <= found.pop("time") <= time.time()
    assert found == {"plane": "p", "node": 1}


def test_only_its_user_can_read_it(tmp_path):
    before = os.umask(0)
    try:
        write_status(tmp_path, {})
    finally:
        os.umask(before)
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_who_reads_while_it_is_written_sees_a_whole_one(tmp_path):
    write_status(tmp_path, {"number": 0, "again": 0, "more": "x" * 9})
    is_over = threading.Event()

    def write():
        for number in range(400):
            write_status(tmp_path, {"number": number, "more": "x" * 5000, "again": number})
        is_over.set()

    writing = threading.Thread(target=write)
    writing.start()
    num_read = 0
    while not is_over.is_set():
        found = read_status(tmp_path)
        assert found["number"] == found["again"]
        num_read += 1
    writing.join()
    assert num_read > 1
