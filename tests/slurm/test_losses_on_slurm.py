"""What Slurm itself takes from a job: its nodes for a more urgent one, a node that fails."""

import pytest

from tests.slurm import cluster as slurm
from tests.slurm.jobs import check_steps

MISSING = slurm.what_is_missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3 * 600),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]


def test_a_preempted_job_saves_waits_and_resumes(submit, uninterrupted):
    """Slurm's own preemption, with a time of grace."""
    job = submit("preempted")
    job.wait_for_step(3)
    urgent = ("--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 5")
    number = int(job.cluster.run("sbatch", "--parsable", "--output=urgent-%j", *urgent))
    job.wait_for_start(1)
    assert "received: the job ends after iteration" in job.log, job.told()
    assert job.cluster.job(number)["JobState"] == "COMPLETED", job.told()
    assert job.end() == ("COMPLETED", 0), job.told()
    assert job.fields()["Restarts"] == "1", job.told()
    assert "loaded " in "".join(job.node_logs(1).values()), job.told()
    check_steps(job, uninterrupted)


@pytest.fixture
def lose(cluster):
    """Lets a node fail; brings it back at the end of the test."""
    lost = []

    def lose_node(node):
        cluster.lose_node(node)
        lost.append(node)

    yield lose_node
    for node in lost:
        cluster.bring_back(node)


@pytest.mark.parametrize("place", [0, 1], ids=["where-the-script-runs", "another"])
def test_a_job_resumes_without_a_node_that_fails(submit, uninterrupted, lose, place):
    """The job may start on one node or two."""
    flags = ("--save-interval", "2")
    job = submit(f"failing-{place}", "--nodes=1-2", flags=flags)
    job.wait_for_step(5)
    lose(slurm.NODES[place])
    job.wait_for_start(1)
    assert job.end() == ("COMPLETED", 0), job.told()
    last = int(job.fields()["Restarts"])
    assert f"start {last}: 1 ranks on each of 1 nodes" in job.log, job.told()
    assert "loaded " in "".join(job.node_logs(last).values()), job.told()
    check_steps(job, uninterrupted)


def test_tasks_of_an_array_are_runs_of_their_own(submit, uninterrupted):
    """Both at once, each on a node; one is warned and queued again, the other is left alone."""
    job = submit("array", "--nodes=1", "--array=1-2", RUN_DIR="", RENDEZVOUS_PORT="")
    first, second = job.task(1), job.task(2)
    for one in (first, second):
        one.wait_for_step(3)
    first.cluster.run("scancel", "--signal=USR1", first.at_slurm)
    for one in (first, second):
        assert one.end() == ("COMPLETED", 0), one.told()
        check_steps(one, uninterrupted)
    assert first.fields()["Restarts"] == "1" and second.fields()["Restarts"] == "0"
