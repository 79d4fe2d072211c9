"""Segments appear whole, are shared until written to, and leave nothing behind."""

import errno
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron_hdp.data_plane.cluster.job_folder import SHARED_MEMORY
from megatron_hdp.data_plane.wire import SegmentFolder, pack, unpack
from megatron_hdp.data_plane.wire import segments as segments_module
from tests.support.rank_steps import differences, rank_steps

REPOSITORY = Path(__file__).parents[3]
in_shared_memory = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no /dev/shm here")


@pytest.fixture
def folder(tmp_path):
    made = SegmentFolder.make("steps", tmp_path)
    yield made
    made.close()


def fill(folder, name="one", text=b"text"):
    with folder.create(name, len(text)) as buffer:
        buffer[:] = text


def files_of(folder):
    return sorted(path.name for path in folder.path.iterdir())


def num_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_segment_appears_when_it_is_whole(folder):
    with folder.create("one", 4) as buffer:
        assert files_of(folder) == ["one.part"]
        with pytest.raises(FileNotFoundError, match="found no segment, expected .* ask for the s"):
            folder.attach("one")
        buffer[:] = b"text"
    assert files_of(folder) == ["one"]
    assert (folder.attach("one")[:], folder.num_bytes) == (b"text", 4)
    folder.remove("one")
    folder.remove("one")
    assert files_of(folder) == [] and folder.num_bytes == 0


def test_a_segment_that_failed_leaves_nothing(folder):
    before = num_descriptors()
    with pytest.raises(KeyError), folder.create("one", 4) as buffer:
        array = np.frombuffer(buffer, np.uint8)
        raise KeyError
    assert len(array) == 4 and files_of(folder) == [] and folder.num_bytes == 0
    del array, buffer
    assert num_descriptors() == before
    fill(folder)
    with pytest.raises(AssertionError, match="a segment never changes"):
        fill(folder)
    assert folder.attach("one")[:] == b"text"


def test_a_writer_that_keeps_a_view_is_found(folder):
    with pytest.raises(BufferError), folder.create("one", 8) as buffer:
        kept = np.frombuffer(buffer, np.uint8)
    assert files_of(folder) == [] and len(kept) == 8


def test_writing_changes_the_own_copy_alone(folder):
    step = max(rank_steps([40, 9, 17, 80]), key=lambda one: len(one.share.ids))
    packed = pack(step)
    with folder.create("step", packed.num_bytes) as buffer:
        packed.write_into(buffer)
    bytes_before = (folder.path / "step").read_bytes()
    views = [memoryview(folder.attach("step")) for _ in range(2)]
    mine, other = map(unpack, views)
    for part in mine.micro_batches:
        part.drop(part.sequence_ids)
    assert any("tokens" in name for name in differences(step, mine))
    assert differences(step, other) == []
    assert (folder.path / "step").read_bytes() == bytes_before
    folder.remove("step")
    fill(folder, "step")
    assert differences(step, other) == []  # a step may be removed while ranks train it
    assert folder.attach("step")[:] == b"text"


def test_only_the_owner_may_enter(folder):
    before = os.umask(0)
    try:
        fill(folder)
        loose = SegmentFolder.make("loose", folder.path.parent)
    finally:
        os.umask(before)
    assert folder.path.stat().st_mode & 0o7777 == 0o700 == loose.path.stat().st_mode & 0o7777
    assert (folder.path / "one").stat().st_mode & 0o7777 == 0o600
    loose.path.chmod(0o750)
    with pytest.raises(ValueError, match="loose: found it with owner .* mode 0750, expected owner"):
        SegmentFolder(loose.path)
    with pytest.raises(ValueError, match="mode 0750"):
        SegmentFolder.make("loose", folder.path.parent)
    (folder.path / "one").chmod(0o604)
    with pytest.raises(ValueError, match="one: found it with owner .* mode 0604"):
        folder.attach("one")
    loose.close()


def test_another_users_files_are_refused(folder, monkeypatch):
    fill(folder)
    monkeypatch.setattr(segments_module.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ValueError, match=f"found it with owner {os.getuid()} .*another user could"):
        folder.attach("one")
    with pytest.raises(ValueError, match="another user could"):
        SegmentFolder(folder.path)


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "One", "a.part", "a/b", "a\n", "é", "a" * 121, "\0"),
        *("../steps/one", "../secret", "/etc/passwd"),
    ],
)
def test_other_names_are_refused(folder, tmp_path, name):
    """So nothing outside of the folder is reached."""
    fill(folder)
    (tmp_path / "secret").write_text("secret")
    for use in (folder.attach, folder.remove, lambda name: fill(folder, name)):
        with pytest.raises(ValueError, match="expected lower-case letters, digits and hyphens"):
            use(name)
    with pytest.raises(ValueError, match="for a folder of segments, expected lower-case"):
        SegmentFolder.make(name, folder.path)
    assert files_of(folder) == ["one"]


def test_links_pipes_and_folders_are_not_attached(folder, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (folder.path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(folder.path / "pipe", 0o600)
    (tmp_path / "way").symlink_to(folder.path)
    for use, words in (
        (lambda: folder.attach("link"), "link: found a symbolic link"),
        (lambda: folder.attach("pipe"), "pipe: found no regular file"),
        (lambda: SegmentFolder(tmp_path / "way"), "way: found no folder of this user"),
        (lambda: SegmentFolder.make("secret", tmp_path), "secret: found no folder"),
        (
            lambda: SegmentFolder.make("steps", tmp_path / "missing"),
            "found that it cannot be made .*name another parent",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            use()


@in_shared_memory
def test_full_memory_is_an_error_and_not_a_signal():
    before = num_descriptors()
    folder = SegmentFolder.make(f"test-of-room-{os.getpid()}", SHARED_MEMORY)
    try:
        fill(folder)
        all_of_it = os.statvfs(folder.path)
        size = 2 * all_of_it.f_blocks * all_of_it.f_frsize
        too_large = folder.create("large", size)
        with pytest.raises(ValueError, match=rf"found no room .* free\), expected {size:,} bytes:"):
            too_large.__enter__()
        assert files_of(folder) == ["one"] and folder.num_bytes == 4
    finally:
        folder.close()
    assert num_descriptors() == before


def test_room_is_taken_before_it_is_written(folder, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(segments_module.os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"found no room for a step \(No space left.*--shm-size"):
        fill(folder)
    assert files_of(folder) == []


def test_what_a_killed_process_left_is_removed(tmp_path):
    code = (
        "import os, pathlib; from megatron_hdp.data_plane.wire import SegmentFolder\n"
        f"folder = SegmentFolder.make('steps', pathlib.Path({str(tmp_path)!r}))\n"
        "with folder.create('one', 4) as buffer: pass\n"
        "with folder.create('two', 4) as buffer: os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=570)
    assert done.returncode == -9
    left = tmp_path / "steps"
    assert sorted(path.name for path in left.iterdir()) == ["one", "two.part"]
    folder = SegmentFolder.make("steps", tmp_path)
    assert files_of(folder) == []
    with pytest.raises(ValueError, match="found a living process that writes steps there"):
        SegmentFolder.make("steps", tmp_path)
    fill(folder)
    reader = SegmentFolder(folder.path)
    assert reader.attach("one")[:] == b"text"
    reader.close()
    assert files_of(folder) == ["one"]  # who only reads removes nothing
    folder.close()
    folder.close()
    assert not left.exists()


def test_closing_removes_all_and_keeps_no_descriptor(tmp_path):
    before = num_descriptors()
    folder = SegmentFolder.make("steps", tmp_path)
    fill(folder)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder.path / "socket"))
        mapped = folder.attach("one")
        folder.close()
    assert not folder.path.exists() and mapped[:] == b"text"
    mapped.close()
    with pytest.raises(FileNotFoundError):
        SegmentFolder(folder.path)
    assert num_descriptors() == before


def test_closing_waits_for_what_is_being_written(tmp_path):
    folder = SegmentFolder.make("steps", tmp_path)
    with ThreadPoolExecutor(1) as closer:
        with folder.create("one", 4) as buffer:
            closing = closer.submit(folder.close)
            time.sleep(0.1)
            assert not closing.done() and files_of(folder) == ["one.part"]
            buffer[:] = b"text"
        closing.result(10)
    assert not folder.path.exists()
    with pytest.raises(OSError, match="Bad file descriptor"):
        fill(folder, "two")
    folder.remove("one")


def _read(pipe, path, way):
    """A reader: says what it has read, and by how much that let its memory grow."""

    def own_bytes():
        found = psutil.Process().memory_full_info()
        return np.array([found.uss, found.pss])

    folder = SegmentFolder(path)
    before = own_bytes()
    array = np.frombuffer(folder.attach("step"), np.int64)
    array = array.copy() if way == "copy" else array
    pipe.send(int(array.sum()))
    pipe.recv()  # all of them have read it
    pipe.send(own_bytes() - before)
    pipe.recv()


@in_shared_memory
@pytest.mark.parametrize("way", ["share", "copy"])
def test_readers_take_the_memory_of_one(way):
    num_bytes, num_readers = 16 * 2**20, 3 if way == "share" else 2
    folder = SegmentFolder.make(f"test-of-segments-{os.getpid()}", SHARED_MEMORY)
    fresh = multiprocessing.get_context("spawn")
    readers, pipes = [], []
    try:
        with folder.create("step", num_bytes) as buffer:
            np.frombuffer(buffer, np.int64)[:] = 1
        for _ in range(num_readers):
            ours, theirs = fresh.Pipe()
            readers.append(fresh.Process(target=_read, args=(theirs, folder.path, way)))
            readers[-1].start()
            theirs.close()
            pipes.append(ours)
        assert [one.recv() for one in pipes] == [num_bytes // 8] * num_readers
        for one in pipes:
            one.send("measure")
        private, proportional = sum(one.recv() for one in pipes)
        print(f"{way}: private {private / 2**20:.1f} MiB, Pss {proportional / 2**20:.1f} MiB")
        if way == "share":
            assert private < num_bytes / 4 and proportional < 1.25 * num_bytes
        else:  # the same measure finds copies
            assert private > 0.9 * num_readers * num_bytes
    finally:
        for one in readers:
            one.kill()
            one.join(60)
        folder.close()
    assert not folder.path.exists()
