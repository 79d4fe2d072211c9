"""What was decided is on disk before anybody hears of it, and one planner is the one."""

import errno
import os
import subprocess
import sys

import pytest

from megatron_hdp.data_plane.roles import Entry, FencedError, Journal
from megatron_hdp.data_plane.roles import journal as module

OPENING = """
import sys
from pathlib import Path
from megatron_hdp.data_plane.roles.journal import Journal
sys.stdin.readline()
print(*(Journal(Path(sys.argv[1])).epoch for _ in range(20)))
"""


def entry(step, **changes):
    fields = {
        "split": "train",
        "before": {"steps": step, "owed": 0.1 + 0.2},
        "after": {"steps": step + 1, "owed": -5e-324},
        "fingerprints": {"plan": 2**64 - 1 - step},
        "failure": None,
    }
    return Entry(**(fields | changes))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "journal"


@pytest.fixture
def no_disk(monkeypatch):
    """Wait for no disk, where a test writes thousands of times."""
    monkeypatch.setattr(module.os, "fsync", lambda file: None)


def steps_file(folder):
    return folder / "steps.jsonl"


def test_what_is_appended_is_read_to_the_bit(folder):
    entries = [entry(0), entry(1, failure="a „failure”\n\0"), entry(2, split="valid")]
    journal = Journal(folder)
    assert journal.entries() == []
    for one in entries:
        journal.append(one)
    assert journal.entries() == entries
    assert Journal(folder).entries() == entries


def test_a_planner_that_was_replaced_can_neither_append_nor_answer(folder):
    old = Journal(folder)
    old.append(entry(0))
    old.require_current()
    new = Journal(folder)
    before = steps_file(folder).read_bytes()
    for forbidden in (old.require_current, lambda: old.append(entry(1))):
        with pytest.raises(FencedError, match="is of epoch 1, one of epoch 2 has taken over"):
            forbidden()
    assert steps_file(folder).read_bytes() == before
    new.require_current()
    new.append(entry(1))
    assert new.entries() == [entry(0), entry(1)]


def test_of_an_entry_that_a_kill_cut_nothing_is_left_and_what_follows_is_read(folder, no_disk):
    journal = Journal(folder)
    journal.append(entry(0))
    begin = steps_file(folder).stat().st_size
    journal.append(entry(1))
    data = steps_file(folder).read_bytes()
    for end in range(begin, len(data) + 1):
        steps_file(folder).write_bytes(data[:end])
        after = Journal(folder)
        is_whole = end >= len(data) - 1  # but for the end of its line
        expected = [entry(0), entry(1)] if is_whole else [entry(0)]
        assert after.entries() == expected, end
        after.append(entry(2))
        after.append(entry(3))
        assert after.entries() == [*expected, entry(2), entry(3)], end


def test_at_its_limit_the_latest_are_kept(folder, monkeypatch, no_disk):
    monkeypatch.setattr(module, "_MOST_BYTES", 20_000)
    monkeypatch.setattr(module, "_KEPT", 5)
    journal, largest, cuts = Journal(folder), 0, 0
    before = 0
    for step in range(500):
        journal.append(entry(step))
        size = steps_file(folder).stat().st_size
        largest, cuts, before = max(largest, size), cuts + (size < before), size
        found = [one.before["steps"] for one in journal.entries()]
        assert found == list(range(found[0], step + 1)) and len(found) >= min(step + 1, 6)
    assert cuts > 3
    assert largest < 20_000 + 500


def test_processes_that_open_at_the_same_time_get_epochs_of_their_own(folder):
    command = [sys.executable, "-c", OPENING, str(folder)]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for one in running:
        one.stdin.write("go\n")
        one.stdin.flush()
    taken = [int(word) for one in running for word in one.communicate(timeout=570)[0].split()]
    assert sorted(taken) == list(range(1, 61))


def test_an_entry_is_on_the_disk_before_its_planner_goes_on(folder, monkeypatch):
    journal = Journal(folder)
    done = []

    def noted(name):
        real = getattr(os, name)

        def call(file, *arguments):
            done.append((name, os.readlink(f"/proc/self/fd/{file}")))
            return real(file, *arguments)

        monkeypatch.setattr(module.os, name, call)

    noted("write")
    noted("fsync")
    path = str(steps_file(folder))
    journal.append(entry(0))
    of_file = [("write", path), ("fsync", path)]
    assert done == [*of_file, ("fsync", str(folder))]  # its name, too
    done.clear()
    journal.append(entry(1))
    assert done == of_file


@pytest.mark.parametrize(
    "code, told",
    [(errno.ENOSPC, "no room for the data plane's journal .No space left"), (errno.EIO, "Input")],
)
def test_a_disk_that_takes_a_part_of_an_entry_loses_no_other(folder, monkeypatch, code, told):
    journal, real = Journal(folder), os.write
    journal.append(entry(0))

    def full(file, data):
        real(file, bytes(data)[:10])
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(module.os, "write", full)
    with pytest.raises(OSError if code == errno.EIO else ValueError, match=told):
        journal.append(entry(1))
    monkeypatch.setattr(module.os, "write", real)
    journal.append(entry(2))
    assert journal.entries() == [entry(0), entry(2)]
