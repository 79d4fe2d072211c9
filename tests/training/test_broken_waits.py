"""Waits that are broken without an error, as on GPUs: what they leave counts for nothing.

gloo raises where a wait is broken. NCCL's kernel ends, and the host reads what lies in its buffer
(`runtime.epochs.nccl`). Here gloo is made to do the same.
"""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_hdp.megatron.world.recovery import Recovery
from megatron_hdp.runtime.epochs import EpochOverError, Membership
from tests.support.epochs import SurvivingJob
from tests.training.test_lost_rank import (
    MOMENTS,
    SHARDED,
    SLOW,
    reference,
    require_same_steps,
    require_survived,
    surviving,
)

_BREAKS_S = 20.0


def waits_end_without_an_error(member):
    """A fault: until the epoch is over a wait for a dead rank goes on, and then just ends."""
    entered = []
    enter, wait = Membership.enter, dist.Work.wait

    def noted(self, *args):
        entered[:] = [self]
        return enter(self, *args)

    def quiet(self, *args):
        try:
            return wait(self, *args)
        except RuntimeError:
            if not entered or not entered[0].is_over.wait(_BREAKS_S):
                raise
            print(f"member {member}: a wait has ended without an error", flush=True)
            return True

    Membership.enter, dist.Work.wait = noted, quiet


@pytest.mark.parametrize(
    ("moment", "how"),
    [
        pytest.param(one, how, marks=() if (one, how) == ("in the step", "whole") else SLOW)
        for one in MOMENTS
        for how in ("whole", "sharded")
    ],
)
def test_nothing_comes_of_what_they_leave(run_ranks, tmp_path, moment, how):
    """A gradient that is not whole passes the vote, and no optimizer applies it."""
    settings = {"save": tmp_path / "saved", "save_interval": 1, "eval_interval": 1}
    arguments = surviving(tmp_path, **settings, **(SHARDED if how == "sharded" else {}))
    quiet = dict.fromkeys((1, 2), waits_end_without_an_error)
    job = SurvivingJob(arguments, 3, tmp_path, {0: MOMENTS[moment]} | quiet)
    require_survived(job, job.run())
    assert job.coordinator.epoch.members == (1, 2)
    assert any("without an error" in text for text in job.printed().values()), "it was planted"
    require_same_steps(job, reference(run_ranks, tmp_path, eval_interval=1))


def test_no_weight_changes_by_a_norm_that_does_not_count():
    done, optimizer = [], SimpleNamespace(get_grad_norm=lambda: 4.0)

    def step():
        done.append(optimizer.get_grad_norm())

    recovery = Recovery.__new__(Recovery)
    recovery._world = SimpleNamespace(optimizer=optimizer)
    recovery._catches_up = False
    recovery.membership = Membership.__new__(Membership)
    recovery.membership.is_over = SimpleNamespace(is_set=lambda: len(done) == 1)
    with recovery.applying():
        step()
    with pytest.raises(EpochOverError), recovery.applying():
        step()
    assert done == [4.0]
    recovery._catches_up = True  # by a norm that others have applied
    with recovery.applying():
        step()
    assert done == [4.0, 4.0] and optimizer.get_grad_norm() == 4.0
