"""Waits that are broken without an error, as on GPUs: what they leave counts for nothing.

gloo raises where a wait is broken. NCCL's kernel ends, and the host reads what lies in its buffer
(`runtime.epochs.nccl`). Here gloo is made to do the same.
"""

import signal
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_hdp.megatron.lm.survival import LmSurvival
from megatron_hdp.megatron.world.recovery import Recovery
from megatron_hdp.runtime.epochs import EpochOverError, Membership
from megatron_hdp.training import survival
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


@SLOW  # what does not count is applied by nobody: below
@pytest.mark.parametrize("how", ["whole", "sharded"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_nothing_comes_of_what_they_leave(run_ranks, tmp_path, moment, how):
    """A gradient that is not whole passes the vote, and no optimizer applies it."""
    settings = {"save": tmp_path / "saved", "save_interval": 1, "eval_interval": 1}
    arguments = surviving(tmp_path, **settings, **(SHARDED if how == "sharded" else {}))
    quiet = dict.fromkeys((0, 1), waits_end_without_an_error)  # the one that writes among them
    job = SurvivingJob(arguments, 3, tmp_path, {2: MOMENTS[moment]} | quiet)
    require_survived(job, job.run())
    assert job.coordinator.epoch.members == (0, 1)
    assert any("without an error" in text for text in job.printed().values()), "it was planted"
    require_same_steps(job, reference(run_ranks, tmp_path, eval_interval=1))


@pytest.mark.parametrize("ends_behind", ["the vote", "the norm"])
def test_no_weight_changes_by_what_does_not_count(ends_behind):
    is_over, asked, applied = threading.Event(), [], []

    def get_grad_norm():
        asked.append(1)
        if ends_behind == "the norm":
            is_over.set()
        return 4.0

    def apply():
        with recovery.applying():
            applied.append(optimizer.get_grad_norm())

    optimizer = SimpleNamespace(get_grad_norm=get_grad_norm)
    recovery = Recovery.__new__(Recovery)
    recovery._world = SimpleNamespace(optimizer=optimizer)
    recovery._catches_up = False
    recovery.membership = Membership.__new__(Membership)
    recovery.membership.is_over = is_over
    if ends_behind == "the vote":
        apply()
        assert applied.pop() == asked.pop() * 4.0
        is_over.set()
    with pytest.raises(EpochOverError):
        apply()
    assert len(asked) == (ends_behind == "the norm")
    recovery._catches_up = True  # with others, who have applied it
    assert applied == []
    apply()
    assert applied == [4.0] and optimizer.get_grad_norm is get_grad_norm


def require_ongoing():
    raise EpochOverError


def test_what_ranks_agree_on_behind_a_step_may_not_count():
    run = survival._Run.__new__(survival._Run)
    membership = SimpleNamespace(leaves_next=False, require_ongoing=require_ongoing)
    run.recovery = SimpleNamespace(membership=membership, copied=3)
    run._shards = SimpleNamespace(complete=3)
    run._signals = SimpleNamespace(agreed_with=lambda more, device: (signal.SIGTERM, [1, -9]))
    with pytest.raises(EpochOverError):
        run._agreed()
    assert run.recovery.copied == 3


def test_megatrons_log_has_no_line_of_what_does_not_count():
    loop = LmSurvival.__new__(LmSurvival)
    loop.recovery = SimpleNamespace(membership=SimpleNamespace(require_ongoing=require_ongoing))
    with pytest.raises(EpochOverError):
        loop.log(lambda **_: pytest.fail("it has a line"), {"total_loss_dict": {}, "iteration": 3})
