"""The job script on a real Slurm of two made-up nodes: warnings, requeues, nodes lost, failures."""

import signal
import time

import pytest

from tests.slurm import cluster as slurm
from tests.slurm.jobs import check_completed, check_losses

MISSING = slurm.what_is_missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3 * 600),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]

KINDS = {
    "steps": ("--signal=USR1", "--signal=TERM"),
    "batch-script": ("--signal=USR1 --batch", "--signal=TERM --batch"),
    "both": ("--signal=USR1 --full", "--signal=TERM --full"),
}


@pytest.mark.parametrize("to", KINDS)
def test_a_warning_saves_and_queues_again(submit, uninterrupted, to):
    """Sent as users send it: to the steps, to the script, to both; one start after the other."""
    job = submit(f"warned-{to}")
    for start, options in enumerate(KINDS[to]):
        job.wait_for_step(3 if start == 0 else len(job.steps()) + 3)
        job.cluster.run("scancel", *options.split(), job.number)
        job.wait_for_start(start + 1)
        text = job.node_text(start)
        assert "received: the job ends after iteration" in text, job.told()
        assert "saved checkpoint of iteration" in text, job.told()
    check_completed(job, uninterrupted)
    assert job.fields()["Restarts"] == "2", job.told()
    assert job.log.count("queued again") == 2, job.told()
    assert "loaded " in job.node_text(2), job.told()


@pytest.fixture
def take_away(cluster):
    """Takes a node away, until the end of the test."""
    taken = []

    def drain(node):
        cluster.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
        taken.append(node)

    yield drain
    for node in taken:
        cluster.run("scontrol", "update", f"nodename={node}", "state=resume")


def test_a_job_resumes_after_a_requeue_and_on_fewer_nodes(submit, uninterrupted, take_away):
    """One node is taken away while the job waits; it may start on one or two."""
    job = submit("fewer", "--nodes=1-2")
    job.wait_for_step(3)
    job.cluster.run("scontrol", "requeue", job.number)
    take_away(slurm.NODES[0])
    check_completed(job, uninterrupted)
    assert set(job.node_logs(0)) == {"0", "1"} and set(job.node_logs(1)) == {"0"}, job.told()
    assert "start 1: 1 ranks on each of 1 nodes" in job.log, job.told()
    assert "saved checkpoint of iteration" in job.node_text(0), job.told()


def test_a_killed_rank_is_named_and_the_job_tried_again(submit, uninterrupted):
    flags = ("--save-interval", "2")
    job = submit("killed", flags=flags, MAX_RETRIES="1")
    for start in range(2):
        job.wait_for_step(3 if start == 0 else len(job.steps()) + 3)
        job.ranks()[1].send_signal(signal.SIGKILL)
        if start == 0:
            job.wait_for_start(1)
    assert job.end() == ("FAILED", 128 + signal.SIGKILL), job.told()
    assert job.log.count("rank 1 (host ") >= 2 and "died or was stopped" in job.log, job.told()
    assert job.log.count("queued again") == 1, job.told()
    check_losses(job, uninterrupted)


def test_a_mistake_is_not_tried_again(submit):
    job = submit("mistake", flags=("--data-path", "nowhere"))
    assert job.end() == ("FAILED", 2), job.told()
    assert job.fields()["Restarts"] == "0" and "pretrain_gpt: error" in job.log, job.told()


def test_a_cancelled_job_is_saved_and_not_queued_again(submit):
    job = submit("cancelled")
    job.wait_for_step(3)
    job.cluster.run("scancel", job.number)
    assert job.end()[0] == "CANCELLED", job.told()
    tracker = job.run_dir / "checkpoints/latest_checkpointed_iteration.txt"
    job.wait_for("checkpoint", tracker.exists)
    time.sleep(2 * slurm.CREDENTIAL_S)
    assert job.fields()["JobState"] == "CANCELLED" and job.fields()["Restarts"] == "0"
    job.wait_for("end of all processes", lambda: not job.processes(), timeout_s=60)


def test_a_job_near_its_time_limit_saves_and_resumes(submit):
    """Slurm itself warns, 130 s before the limit of three minutes."""
    limits = ("--time=3", "--signal=USR1@130")
    job = submit("limited", *limits, flags=("--train-iters", "100000"))
    job.wait_for("warning", lambda: "queued again" in job.log)
    assert "SIGUSR1 received: the job ends after iteration" in job.log, job.told()
    before = len(job.steps())
    job.wait_for_step(before + 3)
    assert [step["step"] for step in job.steps()][: before + 3] == list(range(1, before + 4))
    assert "loaded " in job.node_text(1), job.told()


def test_a_preempted_job_saves_waits_and_resumes(submit, uninterrupted):
    """Slurm's own preemption, with a time of grace."""
    job = submit("preempted")
    job.wait_for_step(3)
    urgent = ("--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 5")
    number = int(job.cluster.run("sbatch", "--parsable", "--output=urgent-%j", *urgent))
    job.wait_for_start(1)
    assert "received: the job ends after iteration" in job.log, job.told()
    assert job.cluster.job(number)["JobState"] == "COMPLETED", job.told()
    check_completed(job, uninterrupted)
    assert job.fields()["Restarts"] == "1", job.told()
    assert "loaded " in job.node_text(1), job.told()


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
    check_completed(job, uninterrupted)
    last = int(job.fields()["Restarts"])
    assert f"start {last}: 1 ranks on each of 1 nodes" in job.log, job.told()
    assert "loaded " in job.node_text(last), job.told()


def test_tasks_of_an_array_are_runs_of_their_own(submit, uninterrupted):
    """Both at once, each on a node; one is warned and queued again, the other is left alone."""
    job = submit("array", "--nodes=1", "--array=1-2", RUN_DIR="", RENDEZVOUS_PORT="")
    first, second = job.task(1), job.task(2)
    for one in (first, second):
        one.wait_for_step(3)
    first.cluster.run("scancel", "--signal=USR1", first.at_slurm)
    for one in (first, second):
        check_completed(one, uninterrupted)
    assert first.fields()["Restarts"] == "1" and second.fields()["Restarts"] == "0"
