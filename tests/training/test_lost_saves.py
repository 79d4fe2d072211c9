"""A rank is lost beside an asynchronous save: the folder stays whole, the save is made again."""

import functools
import os
import signal
import time

import pytest

from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.megatron.checkpoint import checksums
from megatron_hdp.megatron.checkpoint.folder import TRACKER
from megatron_hdp.megatron.checkpoint.verification import verify
from megatron_hdp.training.metrics import MetricsLogger
from tests.support.epochs import DiesIn, SurvivingJob, has_no_room
from tests.support.gradients import write_corpus
from tests.training.runs import LENGTHS, curve, lines_of, run
from tests.training.test_lost_rank import (
    EXACT,
    WHOLE,
    each_moment,
    reference,
    require_same_steps,
    require_survived,
    surviving,
)


def writes_slowly(member):
    """Its writer of a checkpoint takes a while."""
    original = checksums.write_and_sum

    def slowed(*args, **kwargs):
        time.sleep(3.0)
        return original(*args, **kwargs)

    checksums.write_and_sum = slowed


CHECKPOINTS = "megatron_hdp.megatron.checkpoint.checkpoints"
SAVING = {
    "before": DiesIn("save_if_due", 2),
    "under way": DiesIn("gradients_of_step", 4),
    "as it becomes visible": DiesIn("Checkpoints._publish", 1, module=CHECKPOINTS),
    "behind it": DiesIn("Checkpoints._publish", 1, behind=True, module=CHECKPOINTS),
    "at the end": DiesIn("Checkpoints.finish", 1, module=CHECKPOINTS),
}


@pytest.mark.slow
@each_moment(SAVING, "under way")
def test_a_save_under_way_is_made_again(run_ranks, tmp_path, moment, victim):
    """The first save under way is of step 3, or of the last one."""
    saved, published = tmp_path / "saved", []
    steps = 6 if moment == "at the end" else 3
    changes = {"save": saved, "save_interval": steps, "async_save": True}
    faults = {1: writes_slowly, victim: SAVING[moment]}

    def disturb(job):
        found = (one.name for one in saved.glob("iter_???????"))
        published.extend(one for one in found if one not in published)

    job = SurvivingJob(surviving(tmp_path, **changes), 3, tmp_path, faults)
    require_survived(job, job.run(disturb))
    expected = reference(run_ranks, tmp_path, train_iters=8)
    require_same_steps(job, expected[:6])
    if moment == "under way":  # of step 3, in step 4
        assert "iter_0000003" in published
    left = [one.name for one in saved.iterdir() if one.name.startswith("iter_")]
    assert sorted(left) == sorted(set(published) | {"iter_0000006"})
    assert (saved / TRACKER).read_text() == "6"
    for one in left:
        assert not verify(saved / one, int(one[5:])).faults
    more = {"load": saved, "train_iters": 8, "metrics_path": tmp_path / "continued.jsonl"}
    run_ranks(1, curve, run(write_corpus(tmp_path, LENGTHS), **(WHOLE | more)))
    continued = lines_of(tmp_path / "continued.jsonl")
    assert [one["step"] for one in continued] == [7, 8]
    for found, whole in zip(continued, expected[6:], strict=True):
        for name in ("loss", "grad_norm"):
            assert abs(found[name] / whole[name] - 1) < EXACT


class IsAskedToEndIn(DiesIn):
    """The process gets SIGTERM there."""

    def happen(self):
        """Sends it."""
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_who_is_asked_to_end_while_groups_are_made_anew_saves(tmp_path):
    """The latest step was written before: nothing else is left to be done."""
    saved = tmp_path / "saved"
    faults = {
        0: DiesIn("save_if_due", 3, behind=True),
        1: IsAskedToEndIn("enter_job", 2, module="megatron_hdp.megatron.parallel"),
    }
    job = SurvivingJob(surviving(tmp_path, save=saved, save_interval=100), 3, tmp_path, faults)
    require_survived(job, job.run())
    assert [one["step"] for one in job.steps()] == [1, 2, 3]
    assert (saved / TRACKER).read_text() == "3"


@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True])
def test_a_full_disk_behind_a_death_ends_the_job(tmp_path, beside):
    """All that are left say so, and the checkpoint before stays: it is to be started again."""
    saved = tmp_path / "saved"
    arguments = surviving(tmp_path, save=saved, save_interval=1, async_save=beside)
    no_room = functools.partial(has_no_room, 3)
    faults = {0: no_room, 1: no_room, 2: DiesIn("gradients_of_step", 3)}
    job = SurvivingJob(arguments, 3, tmp_path, faults)
    codes = job.run()
    assert job.coordinator.epoch.members == (0, 1) and set(codes) == {ExitCode.BLAMES_ANOTHER}, (
        job.said
    )
    words = "the checkpoint of iteration 3 could not be saved: "
    assert all(words in job.printed()[f"member-{one}"] for one in (0, 1))
    assert sorted(one.name for one in saved.iterdir()) == sorted(
        ["iter_0000001", "iter_0000002", TRACKER]
    )
    assert (saved / TRACKER).read_text() == "2"


def has_no_room_for_metrics(member):
    """From step 3 on."""
    original, lines = MetricsLogger._put, []

    def put(logger, line):
        lines.append(line)
        if len(lines) == 3:
            with open("/dev/full", "wb", buffering=0) as logger._file:
                original(logger, line)
        original(logger, line)

    MetricsLogger._put = put


@pytest.mark.slow
def test_a_full_disk_for_metrics_behind_a_death_ends_the_job(tmp_path):
    """The rank that writes them says so; the other one waits for it, and is let go."""
    faults = {0: has_no_room_for_metrics, 2: DiesIn("gradients_of_step", 3)}
    job = SurvivingJob(surviving(tmp_path), 3, tmp_path, faults)
    codes = job.run()
    assert job.coordinator.epoch.members == (0, 1), job.said
    assert set(codes) == {ExitCode.BLAMES_ANOTHER}, job.printed()
    assert "metrics.jsonl cannot be written (No space left" in job.printed()["member-0"]
    assert "the job any more (member 0 ended with exit code 3)" in job.printed()["member-1"]
    assert [one["step"] for one in job.steps()] == [1, 2]
