"""What a run finds in its folder at the start, and which checkpoints it may replace."""

import os
import threading
from contextlib import contextmanager
from unittest import mock

import pytest

from megatron_hdp.megatron.checkpoint import owner
from megatron_hdp.megatron.checkpoint.folder import TRACKER, CheckpointFolder
from megatron_hdp.megatron.checkpoint.run_folder import RunFolder
from tests.megatron.checkpoint.test_folder import content, write


def names(path):
    return sorted(one.name for one in path.iterdir())


@pytest.fixture
def folder(tmp_path):
    """Iterations 2, 4 and 6."""
    for iteration in (2, 4, 6):
        write(CheckpointFolder(tmp_path / "checkpoints"), iteration, f"old {iteration}")
    return tmp_path / "checkpoints"


@contextmanager
def taken(path):
    run = RunFolder(path, print)
    run.take()
    yield run
    run.give_up()


@pytest.fixture
def run(folder):
    with taken(folder) as run:
        yield run


def save(run, iteration):
    partial = run.begin(iteration)
    for name in ("__0_0.distcp", "common.pt", "metadata.json"):
        (partial / name).write_text("new")
    run.publish(partial, iteration)


def test_a_new_run_is_refused_by_a_folder_that_holds_another(run):
    with pytest.raises(
        ValueError, match=r"found iterations 2, 4, 6, expected none above 0.*--load"
    ):
        run.begin_at(None)


def test_a_run_that_comes_from_elsewhere_is_refused_if_it_could_replace(run, tmp_path):
    elsewhere = CheckpointFolder(tmp_path / "elsewhere")
    for iteration in (5, 6):
        write(elsewhere, iteration, "x")
    with pytest.raises(ValueError, match="found iterations 6, expected none above 5"):
        run.begin_at(elsewhere.find(5))
    assert run.begin_at(elsewhere.find(6)) is None


def test_going_back_replaces_what_was_given_up_when_it_is_reached(run, folder):
    line = run.begin_at(CheckpointFolder(folder).find(2))
    assert "later checkpoints (4, 6)" in line and "resumes from 2" in line
    save(run, 4)
    assert content(CheckpointFolder(folder)) == {"new"}
    assert CheckpointFolder(folder).iterations() == [2, 4, 6]
    with pytest.raises(ValueError, match="has not saved"):  # once: the new one is its own
        run.begin(4)


def test_a_checkpoint_that_appears_meanwhile_is_kept(run, folder):
    run.begin_at(CheckpointFolder(folder).find(6))
    partial = run.begin(8)
    write(CheckpointFolder(folder, lambda: None), 9, "foreign")
    (folder / "iter_0000009").rename(folder / "iter_0000008")
    with pytest.raises(ValueError, match="holds a checkpoint of iteration 8.*it is kept"):
        run.publish(partial, 8)
    assert (folder / "iter_0000008" / "common.pt").read_text() == "foreign"


def test_what_dead_runs_left_goes_at_the_start(folder):
    (folder / "iter_0000008.partial-abc").mkdir()
    (folder / "iter_0000008.partial-abc" / "big").write_text("x")
    (folder / "iter_0000004.replaced").mkdir()
    with taken(folder):
        pass
    assert names(folder) == ["iter_0000002", "iter_0000004", "iter_0000006", TRACKER]


def test_a_kill_before_the_first_tracker_is_not_forgotten_at_the_start(tmp_path):
    path = tmp_path / "checkpoints"
    write(CheckpointFolder(path), 2, "new")
    (path / TRACKER).rename(path / f"{TRACKER}.tmp")
    with taken(path):
        assert CheckpointFolder(path).latest() == 2


def test_what_a_living_run_writes_is_not_touched(run, folder, monkeypatch):
    beats = iter(range(10**6))  # of the run, a beat a look
    record = folder / "owner-1.json"
    monkeypatch.setattr(owner, "sleep", lambda _: os.utime(record, ns=(0, next(beats))))
    run.begin_at(CheckpointFolder(folder).find(6))
    partial = run.begin(8)
    with pytest.raises(ValueError, match="belongs to another job"):
        RunFolder(folder, print).take()
    assert partial.is_dir()


def test_a_save_that_fails_leaves_nothing(run, folder):
    run.begin_at(CheckpointFolder(folder).find(6))
    (run.begin(8) / "big").write_text("x" * 1000)
    run.discard()
    run.discard()
    assert not [name for name in names(folder) if "partial" in name]


def test_a_file_system_that_hangs_at_the_end_is_said(folder, monkeypatch, capsys):
    monkeypatch.setattr(owner, "_RELEASE_S", 0.2)
    run = RunFolder(folder, print)
    run.take()
    run.begin(8)
    goes_on = threading.Event()
    with mock.patch.object(CheckpointFolder, "discard", lambda *_: goes_on.wait(30)):
        run.give_up()
        assert "does not answer" in capsys.readouterr().out
        goes_on.set()


def test_giving_up_removes_what_is_being_written(folder):
    with taken(folder) as run:
        run.begin_at(CheckpointFolder(folder).find(6))
        run.begin(8)
    assert names(folder) == ["iter_0000002", "iter_0000004", "iter_0000006", TRACKER]


@pytest.mark.parametrize("text", ["", "released", "-4", "4.0", "٤", "9" * 5000, "\udcff"])
def test_a_garbage_tracker_is_named_at_the_start(tmp_path, text):
    path = tmp_path / "checkpoints"
    path.mkdir()
    (path / TRACKER).write_bytes(text.encode(errors="surrogateescape"))
    with (
        taken(path) as run,
        pytest.raises(ValueError, match=f"{TRACKER}: found .*expected the number"),
    ):
        run.begin_at(None)


def test_a_folder_that_cannot_be_written_is_found_at_the_start(tmp_path):
    with (
        mock.patch("os.open", mock.Mock(side_effect=OSError(30, "Read-only file system"))),
        pytest.raises(OSError, match="Read-only"),
    ):
        RunFolder(tmp_path / "checkpoints", print).take()
    too_long = tmp_path
    while len(os.fsencode(too_long)) < 4040:
        too_long = too_long / ("d" * min(200, 4060 - len(os.fsencode(too_long))))
    run = RunFolder(too_long, print)
    with pytest.raises(OSError, match="too long"):
        run.take()
    run.give_up()


def test_who_was_followed_by_another_job_publishes_nothing(run, folder):
    run.begin_at(CheckpointFolder(folder).find(6))
    partial = run.begin(8)
    (folder / "owner-9.json").write_text("{}")
    with pytest.raises(ValueError, match="does not belong to this job any more"):
        run.publish(partial, 8)
    assert CheckpointFolder(folder).latest() == 6
    assert "iter_0000008" not in names(folder)


def test_who_was_followed_has_nothing_left_to_publish(run, folder):
    """The new owner has taken its files away, in one rename, so there is no moment for a half."""
    run.begin_at(CheckpointFolder(folder).find(6))
    partial = run.begin(8)
    CheckpointFolder(folder).clear()
    with (
        mock.patch.object(RunFolder, "_require_owned"),  # stopped behind its last look
        pytest.raises(FileNotFoundError),
    ):
        run.publish(partial, 8)
    assert CheckpointFolder(folder).latest() == 6
