"""A rank ends by an error of its own: the others continue, or end with the reason."""

import pytest

from megatron_hdp.exit_codes import ExitCode
from tests.support.epochs import DiesIn, SurvivingJob
from tests.training.test_lost_rank import (
    reference,
    require_same_steps,
    require_survived,
    surviving,
)


class Raises(DiesIn):
    """The process has an error of its own there."""

    error = KeyError

    def happen(self):
        """Raises it."""
        raise self.error("a planted error")


class Mistakes(Raises):
    """The same, as a mistake of the user's."""

    error = ValueError


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_go_on_behind_an_error_of_one_rank(run_ranks, tmp_path, victim):
    faults = {victim: Raises("gradients_of_step", 3)}
    job = SurvivingJob(surviving(tmp_path), 3, tmp_path, faults, may_fail=True)
    require_survived(job, job.run())
    assert any(f"(member {victim} ended with exit code 1)" in line for line in job.said)
    require_same_steps(job, reference(run_ranks, tmp_path))


@pytest.mark.slow
def test_the_others_end_behind_a_mistake_of_one_rank(tmp_path):
    """They wait for it, and are let go with the reason."""
    faults = {1: Mistakes("gradients_of_step", 3)}
    job = SurvivingJob(surviving(tmp_path), 3, tmp_path, faults)
    assert job.run() == [ExitCode.BLAMES_ANOTHER, ExitCode.MISTAKE, ExitCode.BLAMES_ANOTHER]
    for other in (0, 2):
        assert "(member 1 ended with exit code 2)" in job.printed()[f"member-{other}"]
