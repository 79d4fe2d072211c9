"""Over Ray: text whose file changes is drawn no more, by planner and constructors."""

import os
import signal
import time

import pytest

from megatron_hdp.data.mixture import Position
from tests.support.node import until
from tests.support.plane import running_plane
from tests.support.thread_plane import write_notes, write_pairs

pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")
pytestmark = pytest.mark.slow  # roles/test_failures.py asks the same without Ray

GO_ON = "on-failure: go-on-without"


def written(folder):
    write_pairs(folder, more="")
    return write_notes(
        folder,
        2000,
        range(1, 41),
        f", {GO_ON}",
        "schedule: [{from: 0, weights: {notes: 0.5, web: 0.5}}]\n",
    )


def steps_of(plane, position, count):
    """What all readers get of some steps."""
    found = []
    for _ in range(count):
        found.append([one.get(position) for one in plane.remote])
        position = found[-1][0].totals.after
    return found


def until_without(plane, position):
    """Steps until one has no notes, and two more."""
    found, deadline = [], time.monotonic() + 120
    while not found or not found[-1][0].totals.without:
        assert time.monotonic() < deadline
        found += steps_of(plane, position, 1)
        position = found[-1][0].totals.after
    return found + steps_of(plane, position, 2)


def test_a_file_that_changes(tmp_path):
    path = written(tmp_path)
    with running_plane(path) as plane:
        fine = steps_of(plane, Position(), 3)
        with open(tmp_path / "notes.jsonl", "a") as file:
            file.write('\n{"text": "one more"}')
        os.utime(tmp_path / "notes.jsonl")
        later = until_without(plane, fine[-1][0].totals.after)
        # a status is of some moment, perhaps before that
        until(lambda: plane.status()["planner"]["failed"]["train"].keys() == {"notes"}, 60)
    assert "has changed" in later[-1][0].totals.without["notes"]
    assert [one.totals.amounts.source_tokens[0] for one in later[-1]] == [0] * 4
    assert later[-1][0].totals.sequences == 12
    assert not fine[0][0].totals.without and fine[0][0].totals.amounts.source_tokens[0] > 0


def test_loaders_that_hang(tmp_path):
    """The planner asks them how long rows are, and a constructor for tokens."""
    with running_plane(written(tmp_path), timeout_s=30.0, min=2) as plane:
        fine = steps_of(plane, Position(), 3)
        for one in plane.status()["sources"]["train"]["notes"]["loaders"]:
            os.kill(one["pid"], signal.SIGSTOP)
        later = until_without(plane, fine[-1][0].totals.after)
    assert later[-1][0].totals.without["notes"].startswith("no tokens within 30 s: ")
    lost = [lost for step in later for one in step for lost in one.lost]
    assert {one.name for one in lost} <= {"notes"}
    assert len(later) < 12
