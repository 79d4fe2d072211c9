"""A job on the Slurm of the tests: submit it, look at it, wait for it."""

import copy
import json
import sys
import time
from pathlib import Path

import pytest

from megatron_hdp.processes.ports import free_port

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/slurm/pretrain.sbatch"
STEPS = 50
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
        self.name = name
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
        self.at_slurm = str(self.number)
        """What Slurm's commands call it."""

    @property
    def log(self):
        """What the job script has written, over all starts."""
        path = self.cluster.folder / f"{self.name}-{self.number}.log"
        return path.read_text() if path.exists() else ""

    def node_logs(self, start):
        paths = self.run_dir.glob(f"logs/{self.number}/start-{start}/node-*.log")
        return {path.name.split("-")[1]: path.read_text() for path in paths}

    def node_text(self, start):
        return "".join(self.node_logs(start).values())

    def fields(self):
        return self.cluster.job(self.at_slurm)

    def task(self, number):
        """One task of the array that this job is, once Slurm has split it off."""
        one = copy.copy(self)
        one.at_slurm = f"{self.number}_{number}"
        one.wait_for("start", lambda: one.fields()["JobState"] == "RUNNING")
        one.number = int(one.fields()["JobId"])
        one.run_dir = self.run_dir.with_name(f"{self.run_dir.name}-{number}")
        return one

    def steps(self):
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def processes(self):
        """All of the job's processes, with their environments."""
        return [
            (one, environment)
            for one, environment in self.cluster.processes_here()
            if environment.get("SLURM_JOB_ID") == str(self.number)
        ]

    def ranks(self):
        """The processes of the ranks, by rank."""
        found = [(int(of["RANK"]), one) for one, of in self.processes() if "RANK" in of]
        return dict(reversed(found))  # of each the first

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


def check_losses(job, expected=None):
    """Every step once, with the expected losses of an undisturbed job; returns the losses."""
    steps = job.steps()
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1)), job.told()
    losses = [step["loss"] for step in steps]
    if expected is not None:
        assert losses == pytest.approx(expected[: len(losses)], rel=1e-10)
    return losses


def check_completed(job, expected=None):
    """The job has ended well with all steps; returns the losses."""
    assert job.end() == ("COMPLETED", 0), job.told()
    losses = check_losses(job, expected)
    assert len(losses) == STEPS, job.told()
    return losses
