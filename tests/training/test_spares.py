"""A spare takes the place of a lost rank or a straggler; what a rank has beside it is its own."""

import time
from types import SimpleNamespace
from unittest import mock

import pytest

from megatron_hdp.megatron.execution import HdpExecutor
from megatron_hdp.megatron.lm import run as lm_run
from megatron_hdp.megatron.step import HdpSteps
from megatron_hdp.training import survival
from tests.support.epochs import SurvivingJob
from tests.training.test_lost_rank import (
    BEFORE_THE_VOTE,
    MOMENTS,
    SHARDED,
    each_moment,
    reference,
    require_same_steps,
    require_survived,
    surviving,
)


def computes_slowly(member):
    """Each of its micro-batches takes 0.4 s longer: much, also beside ranks of a busy machine."""
    original = HdpExecutor._forward_step

    def slowed(self, *args):
        found = original(self, *args)
        time.sleep(0.4)
        return found

    HdpExecutor._forward_step = slowed


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_a_straggler_leaves_when_a_spare_is_there(run_ranks, tmp_path, sharded):
    steps = {"train_iters": 40, "lr_decay_iters": 40, "global_batch_size": 8}
    changes = {**steps, **(SHARDED if sharded else {})}
    slow = {"hdp_online": True, "hdp_survive_least_speed": 0.5}
    arguments = surviving(tmp_path, **changes, **slow)
    job = SurvivingJob(arguments, 3, tmp_path, {1: computes_slowly}, spares=1)
    require_survived(job, job.run())
    assert job.coordinator.epoch.members == (0, 2, 3), job.said
    assert job.coordinator.retired == {1} and "member 1 leaves, which has 0." in job.said[-1]
    expected = reference(run_ranks, tmp_path, **changes)
    require_same_steps(job, expected, within=1e-11)  # what is rounded otherwise grows with steps


def tells_known_speeds(member):
    """Each time that steps are made anew."""
    original = HdpSteps.__init__

    def telling(self, arguments, executor, cost_model, *args, **kwargs):
        print("speeds", cost_model.rank_speeds)
        original(self, arguments, executor, cost_model, *args, **kwargs)

    HdpSteps.__init__ = telling


@pytest.mark.slow
def test_known_speeds_stay_those_of_their_gpus(run_ranks, tmp_path):
    path = tmp_path / "speeds"
    path.write_text("0.9\n0.7\n0.5\n")
    longer = {"train_iters": 30, "lr_decay_iters": 30}  # on a busy machine a spare comes late
    arguments = surviving(tmp_path, hdp_rank_speeds=path, **longer)
    faults = {0: BEFORE_THE_VOTE, 1: tells_known_speeds}
    job = SurvivingJob(arguments, 3, tmp_path, faults, spares=1)
    require_survived(job, job.run())
    require_same_steps(job, reference(run_ranks, tmp_path, **longer), within=1e-9)
    printed = job.printed()["member-1"].splitlines()
    told = [line for line in printed if line.startswith("speeds")]
    assert (told[0], told[-1]) == ("speeds (0.9, 0.7, 0.5)", "speeds (0.7, 0.5, 1.0)")


@pytest.mark.slow
@each_moment(MOMENTS, None)
def test_a_rank_dies_beside_a_data_plane(run_ranks, tmp_path, moment, victim):
    """The first one holds it: the others lose the one that they ask."""
    pytest.importorskip("ray", reason="pip install 'megatron-hdp[ray]'")
    arguments = surviving(tmp_path, hdp_loaders="ray")
    job = SurvivingJob(arguments, 3, tmp_path, {victim: MOMENTS[moment]}, spares=1)
    require_survived(job, job.run())
    assert victim not in job.coordinator.epoch.members
    require_same_steps(job, reference(run_ranks, tmp_path))


def test_a_data_plane_ends_with_an_epoch_in_which_its_rank_made_no_job():
    """Of a joiner: another rank has died while it made its own."""
    plane = mock.Mock()
    run = survival._Run.__new__(survival._Run)
    run.recovery, run._job = SimpleNamespace(version=None), None
    run._plane = plane
    run.drop()
    plane.end.assert_called_once_with()
    assert run._plane is None


def test_an_epoch_that_ends_while_it_is_entered_interrupts_what_is_made_behind(monkeypatch):
    run = lm_run.LmRun.__new__(lm_run.LmRun)
    run._steps, run._validated, run._plane, run._outputs = {}, [], None, None
    run.arguments = None
    run.leave()
    monkeypatch.setattr(run, "_use", lambda executor: run.interrupt(), raising=False)
    monkeypatch.setattr(lm_run, "join_data_plane", lambda arguments, is_late: None)
    run.enter(SimpleNamespace(_config=SimpleNamespace(no_sync_func=None)))
    assert run._is_interrupted
    run.leave()
    assert not run._is_interrupted
