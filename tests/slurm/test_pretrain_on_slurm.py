"""The job script on a real Slurm of two made-up nodes: warnings, requeues, nodes lost, failures."""

import json
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.gradients import write_corpus
from tests.processes import free_port
from tests.slurm import cluster as slurm
from tests.slurm.cluster import running_cluster

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/slurm/pretrain.sbatch"
MISSING = slurm.what_is_missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3 * 600),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]

STEPS = 100
FLAGS = {
    "--num-layers": 1,
    "--seq-length": 256,
    "--hdp-tokens-per-rank": 256,
    "--hdp-global-batch-tokens": 1024,
    "--train-iters": STEPS,
}
JOB_S = 600  # a busy machine needs minutes for one start of two ranks


class Job:
    """One submitted job, and the folder of its run."""

    def __init__(self, cluster, name, *options, flags=(), **environment):
        self.cluster = cluster
        self.run_dir = cluster.folder / "runs" / name
        settings = {
            "CONFIG": str(ROOT / "configs/tiny-cpu.yaml"),
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "RENDEZVOUS_HOST": "127.0.0.1",  # the names of the nodes are made up
            "RENDEZVOUS_PORT": str(free_port()),  # ids begin at 1 in every Slurm of the tests
            "GLOO_SOCKET_IFNAME": "lo",
            "RUN_DIR": f"runs/{name}",
            "DOCTOR": "0",
        }
        words = [str(word) for pair in FLAGS.items() for word in pair]
        words += ["--fp64", "--data-path", str(cluster.folder / "corpus"), *flags]
        command = ("sbatch", "--parsable", "--time=30", f"--job-name={name}", *options)
        self.number = int(cluster.run(*command, SCRIPT, *words, **(settings | environment)))

    @property
    def log(self):
        """What the job script has written, over all starts."""
        path = self.cluster.folder / f"{self.run_dir.name}-{self.number}.log"
        return path.read_text() if path.exists() else ""

    def node_logs(self, start):
        paths = self.run_dir.glob(f"logs/{self.number}/start-{start}/node-*.log")
        return {path.name.split("-")[1]: path.read_text() for path in paths}

    def fields(self):
        return self.cluster.job(self.number)

    def steps(self):
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def ranks(self):
        """The processes of the ranks, by rank."""
        found = {}
        for one in psutil.process_iter():
            try:
                environment = one.environ()
            except psutil.Error:
                continue
            if environment.get("SLURM_JOB_ID") == str(self.number) and "RANK" in environment:
                found.setdefault(int(environment["RANK"]), one)
        return found

    def wait_for(self, what, is_there, timeout_s=JOB_S):
        deadline = time.monotonic() + timeout_s
        while not is_there():
            assert time.monotonic() < deadline, f"no {what}: {self.told()}"
            time.sleep(0.1)

    def wait_for_step(self, step):
        self.wait_for(f"step {step}", lambda: len(self.steps()) >= step)

    def wait_for_start(self, start):
        self.wait_for(f"start {start}", lambda: f"start {start}:" in self.log)

    def end(self):
        """State and exit code in the end."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait_for("end", lambda: self.fields()["JobState"] in ended)
        fields = self.fields()
        return fields["JobState"], int(fields["ExitCode"].split(":")[0])

    def told(self):
        starts = range(int(self.fields()["Restarts"]) + 1)
        logs = [text[-3000:] for start in starts for text in self.node_logs(start).values()]
        return "\n".join([str(self.fields()), self.log, *logs])


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    write_corpus(folder, [30, 200, 256, 64, 120, 10, 90, 256] * 8)
    with running_cluster(folder) as running:
        yield running


@pytest.fixture
def submit(cluster):
    """Submits a job, and cancels it if the test leaves it behind."""
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


@pytest.fixture(scope="module")
def uninterrupted(cluster):
    """The losses of a job on two nodes that nobody disturbed."""
    job = Job(cluster, "uninterrupted", DOCTOR="1")
    assert job.end() == ("COMPLETED", 0), job.told()
    assert "doctor: training can run" in job.log and "start 0: 1 ranks on each of 2" in job.log
    assert set(job.node_logs(0)) == {"0", "1"}
    return check_steps(job)


def check_steps(job, expected=None):
    """Every step once, with the expected losses; returns the losses."""
    steps = job.steps()
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1)), job.told()
    losses = [step["loss"] for step in steps]
    if expected is not None:
        assert losses == pytest.approx(expected, rel=1e-10)
    return losses


KINDS = {
    "steps": ("--signal=USR1", "--signal=TERM"),
    "batch-script": ("--signal=USR1 --batch", "--signal=TERM --batch"),
    "both": ("--signal=USR1 --full", "--signal=TERM --full"),
}


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS.keys())
def test_a_warning_saves_and_queues_again(submit, uninterrupted, kinds, request):
    """Sent as users send it: to the steps, to the script, to both; one start after the other."""
    job = submit(f"warned-{request.node.callspec.id}")
    for start, options in enumerate(kinds):
        job.wait_for_step(3 if start == 0 else len(job.steps()) + 3)
        job.cluster.run("scancel", *options.split(), job.number)
        job.wait_for_start(start + 1)
        text = "".join(job.node_logs(start).values())
        assert "received: the job ends after iteration" in text, job.told()
        assert "saved checkpoint of iteration" in text, job.told()
    assert job.end() == ("COMPLETED", 0), job.told()
    assert job.fields()["Restarts"] == "2", job.told()
    assert job.log.count("queued again") == 2, job.told()
    assert "loaded " in "".join(job.node_logs(2).values()), job.told()
    check_steps(job, uninterrupted)


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


def test_a_job_goes_on_after_a_requeue_and_on_fewer_nodes(submit, uninterrupted, take_away):
    """One node is taken away while the job waits; it may start on one or two."""
    job = submit("fewer", "--nodes=1-2")
    job.wait_for_step(3)
    job.cluster.run("scontrol", "requeue", job.number)
    take_away(slurm.NODES[0])
    assert job.end() == ("COMPLETED", 0), job.told()
    assert set(job.node_logs(0)) == {"0", "1"} and set(job.node_logs(1)) == {"0"}, job.told()
    assert "start 1: 1 ranks on each of 1 nodes" in job.log, job.told()
    assert "saved checkpoint of iteration" in "".join(job.node_logs(0).values()), job.told()
    check_steps(job, uninterrupted)


def test_a_killed_rank_is_named_and_the_job_tried_again(submit, uninterrupted):
    job = submit("killed", flags=("--save-interval", "2"), MAX_RETRIES="1")
    for start in range(2):
        job.wait_for_step(3 if start == 0 else len(job.steps()) + 3)
        job.ranks()[1].send_signal(signal.SIGKILL)
        if start == 0:
            job.wait_for_start(1)
    assert job.end() == ("FAILED", 128 + signal.SIGKILL), job.told()
    assert job.log.count("rank 1 (host ") >= 2 and "died or was stopped" in job.log, job.told()
    assert job.log.count("queued again") == 1, job.told()
    steps = job.steps()
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    losses = [step["loss"] for step in steps]
    assert losses == pytest.approx(uninterrupted[: len(losses)], rel=1e-10)


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


def test_a_job_near_its_time_limit_saves_and_goes_on(submit):
    """Slurm itself warns, 130 s before the limit of three minutes."""
    limits = ("--time=3", "--signal=USR1@130")
    job = submit("limited", *limits, flags=("--train-iters", "100000"))
    job.wait_for("warning", lambda: "queued again" in job.log)
    assert "SIGUSR1 received: the job ends after iteration" in job.log, job.told()
    before = len(job.steps())
    job.wait_for_step(before + 3)
    assert [step["step"] for step in job.steps()][: before + 3] == list(range(1, before + 4))
    assert "loaded " in "".join(job.node_logs(1).values()), job.told()
