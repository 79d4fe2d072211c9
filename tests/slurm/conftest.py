"""One Slurm for all tests of a session that submit jobs."""

import time

import pytest

from tests.slurm.cluster import running_cluster
from tests.slurm.jobs import JOB_S, Job, check_completed
from tests.support.gradients import write_corpus


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    write_corpus(folder, [30, 200, 256, 64, 120, 10, 90, 256] * 8)
    with running_cluster(folder) as running:
        yield running


@pytest.fixture
def submit(cluster):
    """Submits a job, and cancels it if the test leaves it behind."""
    cluster.wait_until_idle()  # a node that a test before took away is not back at once
    jobs = []

    def submit_one(name, *options, **more):
        jobs.append(Job(cluster, name, *options, **more))
        return jobs[-1]

    yield submit_one
    for job in jobs:
        cluster.run("scancel", job.number)
    deadline = time.monotonic() + JOB_S
    while cluster.run("squeue", "--noheader"):
        assert time.monotonic() < deadline, cluster.run("squeue")
        time.sleep(0.5)


@pytest.fixture(scope="session")
def uninterrupted(cluster):
    """The losses of a job on two nodes that nobody disturbed."""
    job = Job(cluster, "uninterrupted", DOCTOR="1")
    losses = check_completed(job)
    assert "doctor: training can run" in job.log and "start 0: 1 ranks on each of 2" in job.log
    assert set(job.node_logs(0)) == {"0", "1"}
    return losses
