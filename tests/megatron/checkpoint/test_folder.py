"""A whole checkpoint is the latest, at whatever line the program that writes the next one ends."""

import os
import shutil
import signal
import sys

import pytest

from megatron_hdp import files
from megatron_hdp.megatron.checkpoint import folder as checkpoint_folder
from megatron_hdp.megatron.checkpoint.folder import RELEASE, TRACKER, CheckpointFolder

FILES = ("__0_0.distcp", "common.pt", "metadata.json")
TRACED = {checkpoint_folder.__file__, files.__file__, shutil.__file__}


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    """A killed program's writes are not lost; only a machine that goes down loses them."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def killed_at_line(number, call):
    """Calls `call` in a process that SIGKILLs itself at its `number`-th line in the traced files.

    Returns False if the call has fewer lines. A function of this file that is traced has `_traced`
    in its name.
    """
    child = os.fork()
    if child == 0:
        _trace_until(number)
        try:
            call()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


def _trace_until(number, then=lambda: os.kill(os.getpid(), signal.SIGKILL)):
    left = number

    def trace(frame, event, _):
        nonlocal left
        code = frame.f_code
        if code.co_filename not in TRACED and "_traced" not in code.co_name:
            return None
        if event == "line":
            if left == 0:
                then()
            left -= 1
        return trace

    sys.settrace(trace)


def write(folder, iteration, text):
    partial = folder.begin(iteration)
    for name in FILES:
        (partial / name).write_text(text)
    folder.publish(partial, iteration)


def write_in_place_traced(folder, iteration, text):
    """The planted fault: readers may look at what is being written."""
    place = folder.path / f"iter_{iteration:07d}"
    place.mkdir(parents=True, exist_ok=True)
    (folder.path / TRACKER).write_text(str(iteration))
    for name in FILES:
        (place / name).write_text(text)


def content(folder):
    """What a reader finds: the latest checkpoint's texts, None for a file that is missing."""
    place = folder.find(folder.latest())
    return {(place / name).read_text() if (place / name).exists() else None for name in FILES}


def contents_after_kills(tmp_path, writer, earlier, last):
    """What readers find after a kill at each line of the writer of the last save."""
    found = []
    for line in range(10_000):
        folder = CheckpointFolder(tmp_path / str(line))
        for save in earlier:
            write(folder, *save)
        if not killed_at_line(line, lambda folder=folder: writer(folder, *last)):
            return found
        found.append(content(folder))
        write(folder, *last)  # the next run saves the same step, whatever it finds
        assert content(folder) == {last[1]}
        names = {f"iter_{iteration:07d}" for iteration, _ in (*earlier, last)}
        assert {path.name for path in folder.path.iterdir()} == names | {TRACKER}
    raise AssertionError("the writer does not end")


@pytest.mark.parametrize(
    "earlier",
    [
        [(1, "old")],
        pytest.param([(1, "first"), (2, "old")], marks=pytest.mark.slow),
        pytest.param([(2, "other"), (1, "old")], marks=pytest.mark.slow),
    ],
    ids=["new-step", "same-step-again", "step-of-an-abandoned-future"],
)
def test_a_kill_leaves_the_old_or_the_new_checkpoint(tmp_path, earlier):
    found = contents_after_kills(tmp_path, write, earlier, (2, "new"))
    assert len(found) > 30
    assert all(texts in ({"old"}, {"new"}) for texts in found)
    assert found[0] == {"old"} and found[-1] == {"new"}


@pytest.mark.slow
def test_a_kill_in_the_first_save_leaves_nothing_or_the_checkpoint(tmp_path):
    found = []
    for line in range(10_000):
        folder = CheckpointFolder(tmp_path / str(line))
        killed = killed_at_line(line, lambda folder=folder: write(folder, 2, "new"))
        found.append(None if folder.latest() is None else content(folder))
        if not killed:
            break
    assert found[0] is None and found[-1] == {"new"}
    assert all(texts in (None, {"new"}) for texts in found)


def test_a_first_save_that_ends_while_a_reader_looks_is_no_lost_tracker(tmp_path):
    """At whatever line of the reader the writer publishes."""
    found = []
    for line in range(100):
        folder = CheckpointFolder(tmp_path / str(line))
        partial = folder.begin(2)
        _trace_until(line, lambda folder=folder, partial=partial: folder.publish(partial, 2))
        try:
            found.append(folder.latest())
        finally:
            sys.settrace(None)
        if not (folder.path / TRACKER).exists():
            break
    assert len(found) > 10 and found[0] == 2 and found[-1] is None
    assert set(found) == {None, 2}


@pytest.mark.slow
def test_two_kills_while_the_same_step_is_replaced(tmp_path):
    """The second run dies too, at any line, after the first died between its two renames."""
    for line in range(10_000):
        folder = CheckpointFolder(tmp_path / str(line))
        write(folder, 1, "old")
        (folder.path / "iter_0000001").rename(folder.path / "iter_0000001.replaced")
        killed = killed_at_line(line, lambda folder=folder: write(folder, 1, "new"))
        assert content(folder) in ({"old"}, {"new"})
        if not killed:
            return


def test_writing_in_place_fails_the_check(tmp_path):
    found = contents_after_kills(tmp_path, write_in_place_traced, [(1, "old")], (2, "new"))
    assert any(texts not in ({"old"}, {"new"}) for texts in found)


def test_a_writer_of_a_killed_run_is_not_in_the_way(tmp_path):
    """It may still put files into its own folder while a new run saves the same step."""
    folder = CheckpointFolder(tmp_path)
    orphans = folder.begin(1)
    partial = folder.begin(1)
    assert partial != orphans and not orphans.exists()
    orphans.mkdir()
    (orphans / "late.distcp").write_text("late")
    (partial / "common.pt").write_text("new")
    folder.publish(partial, 1)
    assert [path.name for path in folder.find(1).iterdir()] == ["common.pt"]


def test_a_lost_tracker_is_refused_with_what_is_there(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for iteration in (2, 3):
        write(folder, iteration, "x")
    (tmp_path / TRACKER).unlink()
    with pytest.raises(ValueError, match=r"iter_0000002, iter_0000003\): add --ckpt-step 3"):
        folder.latest()
    assert folder.find(3).is_dir()


def test_what_a_later_save_leaves_over_is_removed_by_the_next(tmp_path):
    folder = CheckpointFolder(tmp_path)
    write(folder, 1, "x")
    (tmp_path / "iter_0000001.replaced").mkdir()
    write(folder, 2, "x")
    (tmp_path / "iter_0000001").rename(tmp_path / "iter_0000001.replaced")  # a kill in between
    folder.clear()
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000001", "iter_0000002", TRACKER}
    assert (folder.find(1) / "common.pt").read_text() == "x"


def test_a_missing_checkpoint_is_named_with_those_that_are_there(tmp_path):
    folder = CheckpointFolder(tmp_path)
    write(folder, 3, "x")
    folder.begin(5)
    with pytest.raises(ValueError, match=r"iter_0000007.*--ckpt-step \(it holds iter_0000003\)"):
        folder.find(7)


def test_weights_that_no_run_has_saved(tmp_path):
    folder = CheckpointFolder(tmp_path)
    assert folder.newest() is None  # nothing is there yet
    (tmp_path / TRACKER).write_text(RELEASE)
    assert folder.latest() is None
    with pytest.raises(ValueError, match="does not hold the folder release"):
        folder.newest()
    (tmp_path / RELEASE).mkdir()
    assert folder.newest() == tmp_path / RELEASE and folder.iteration_of(folder.newest()) == 0
    write(folder, 3, "x")  # a run that saves into it begins there
    assert folder.release() is None and folder.newest() == folder.find(3)
