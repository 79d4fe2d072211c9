"""Several nodes: a host is lost, comes back, stands still or is drained; steps stay the same."""

import os
import signal
import sys
import time
from contextlib import contextmanager

import psutil
import pytest

from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.megatron.options import parse_arguments
from megatron_hdp.processes.ports import free_port
from megatron_hdp.runtime.epochs import keys
from tests.support.epochs import DiesIn, SurvivingJob
from tests.support.gradients import write_corpus
from tests.training.runs import LENGTHS, curve, flags, lines_of
from tests.training.test_lost_rank import (
    SHARDED,
    reference,
    require_same_steps,
    require_survived,
    surviving,
)

pytestmark = pytest.mark.slow
BATCH = {"global_batch_size": 8, "hdp_slice_multiple": 1, "fp64": True, "lr_decay_iters": 1000}
NEEDS_TWO, NEEDS_THREE = {"hdp_tokens_per_rank": 60}, {"hdp_tokens_per_rank": 40}


def test_a_host_dies_with_its_shards(run_ranks, tmp_path):
    """Both of its ranks at once: the copies of their shards are on the other host."""
    dies = DiesIn("gradients_of_step", 3)
    job = SurvivingJob(
        surviving(tmp_path, **SHARDED), 4, tmp_path, {2: dies, 3: dies}, hosts="aabb"
    )
    require_survived(job, job.run())
    assert job.coordinator.epoch.members == (0, 1)
    require_same_steps(job, reference(run_ranks, tmp_path))


class Nodes:
    """Agents of two ranks each on this machine, whose hosts have different names.

    Args:
        folder: of the corpus, logs and metrics.
        program: what a rank runs, and its arguments.
        num_nodes: how many there are to be.
        spares: of each node.
    """

    def __init__(self, folder, program, num_nodes=2, spares=0):
        write_corpus(folder, LENGTHS)
        self.folder, self.port, self.agents = folder, free_port(), {}
        self.program, self.num_nodes, self.spares = program, num_nodes, spares

    def start(self, node):
        """Starts the agent of a node."""
        options = ["--nproc-per-node", "2", "--nnodes", str(self.num_nodes)]
        options += ["--node-rank", str(node), "--spares-per-node", str(self.spares)]
        options += ["--rdzv-endpoint", f"127.0.0.1:{self.port}", "-m", *self.program]
        command = [sys.executable, "-m", "megatron_hdp.cli.main", "launch", *options]
        environment = os.environ | {keys.HOST: f"host-{node}", "TORCHDYNAMO_DISABLE": "1"}
        with (self.folder / f"log-{node}").open("a") as log:
            self.agents[node] = psutil.Popen(
                [*command, "--hdp-survive"], stdout=log, stderr=log, env=environment
            )

    def log(self, node):
        """What a node has printed."""
        return (self.folder / f"log-{node}").read_text()

    def steps(self):
        """Lines of metrics so far."""
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def words(self):
        """What all have printed, for a failure's message."""
        return "\n".join(f"--- {node}\n{self.log(node)[-4000:]}" for node in self.agents)

    def until(self, is_so, timeout_s=300):
        """Waits."""
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < deadline, self.words()
            time.sleep(0.05)

    def codes(self, *nodes, timeout_s=300):
        """Exit codes of agents."""
        self.until(lambda: all(self.agents[one].poll() is not None for one in nodes), timeout_s)
        return [self.agents[one].returncode for one in nodes]

    def send(self, node, number):
        """A signal to an agent and all below it, at once."""
        agent = self.agents[node]
        for one in [agent, *agent.children(recursive=True)]:
            one.send_signal(number)

    def ranks(self, node):
        """Processes of a node that train or wait, by age."""
        return sorted(self.agents[node].children(), key=lambda one: one.create_time())


def require_undisturbed(job, run_ranks):
    """Each step once, as a rank that sees whole batches has it."""
    others = {"--metrics-path": "reference.jsonl", "--save": "reference"}
    argv = [*job.program[1:], "--hdp-tokens-per-rank", "1000"]
    for flag, name in others.items():
        argv += [flag, str(job.folder / name)]
    run_ranks(1, curve, parse_arguments(argv))
    expected = lines_of(job.folder / "reference.jsonl")
    found = lines_of(job.folder / "metrics.jsonl")
    assert [one["step"] for one in found] == [one["step"] for one in expected]
    for one, other in zip(found, expected, strict=True):
        for name in ("loss", "grad_norm"):
            assert abs(one[name] / other[name] - 1) < 1e-10, (one["step"], name)


@contextmanager
def begun(job):
    """A job of all of its nodes, in which some steps have ended."""
    try:
        for node in range(job.num_nodes):
            job.start(node)
        job.until(lambda: job.steps() > 3)
        yield job
    finally:
        for agent in job.agents.values():
            if agent.poll() is None:
                below = agent.children(recursive=True)
                agent.kill()  # the kernel ends its ranks
                _, left = psutil.wait_procs(below, timeout=10)
                assert not left
            agent.wait()


def nodes(folder, num_nodes=2, spares=0, **changes):
    """A job of the own command, which does many steps a second."""
    settings = {**BATCH, "metrics_path": folder / "metrics.jsonl", "log_interval": 1}
    argv = flags(folder, **(settings | changes))
    return begun(Nodes(folder, ["megatron_hdp.pretrain_gpt", *argv], num_nodes, spares))


def test_a_host_is_lost_and_comes_back(run_ranks, tmp_path):
    """With one host alone the longest sequence has no room, so that the job waits for the other."""
    with nodes(tmp_path, train_iters=60, **NEEDS_THREE, **SHARDED) as job:
        job.send(1, signal.SIGKILL)
        job.agents[1].wait()
        job.until(lambda: "2 HDP ranks are left, a step needs 3" in job.log(0))
        job.start(1)
        assert job.codes(0, 1) == [ExitCode.DONE, ExitCode.DONE], job.words()
        assert "node 1 (host host-1) gave no sign of life" in job.log(0)
        require_undisturbed(job, run_ranks)


def test_a_host_that_stood_still_writes_nothing(run_ranks, tmp_path):
    saved = {"save": tmp_path / "saved", "save_interval": 20}
    with nodes(tmp_path, train_iters=60, **NEEDS_TWO, **saved, **SHARDED) as job:
        job.send(1, signal.SIGSTOP)
        assert job.codes(0) == [ExitCode.DONE], job.words()
        written = {path: path.stat().st_mtime_ns for path in (tmp_path / "saved").rglob("*")}
        job.send(1, signal.SIGCONT)
        assert job.codes(1) == [ExitCode.BLAMES_ANOTHER], job.words()
        assert "were killed, and write nothing more" in job.log(1)
        now = {path: path.stat().st_mtime_ns for path in (tmp_path / "saved").rglob("*")}
        assert now == written
        require_undisturbed(job, run_ranks)


def test_a_host_that_is_drained_leaves_behind_its_step(run_ranks, tmp_path):
    """Nothing is lost by it; then the first one is told to end, which ends the job."""
    with nodes(tmp_path, train_iters=100_000, **NEEDS_TWO, **SHARDED) as job:
        job.agents[1].send_signal(signal.SIGTERM)
        assert job.codes(1) == [ExitCode.DONE], job.words()
        assert "epoch 1: 2 HDP ranks (node 1 (host host-1) leaves" in job.log(0)
        behind = job.steps()
        job.until(lambda: job.steps() > behind + 3)
        job.agents[0].send_signal(signal.SIGTERM)
        assert job.codes(0) == [ExitCode.DONE], job.words()
        assert "SIGTERM received: the job ends" in job.log(0)
        end_at(job, job.steps())
        require_undisturbed(job, run_ranks)


def end_at(job, steps):
    """So that the run that nobody disturbs ends there, too."""
    job.program[job.program.index("--train-iters") + 1] = str(steps)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_the_only_host_is_drained(run_ranks, tmp_path, number):
    """Slurm's warning, by either signal: there is nobody to go on, so that the job saves."""
    saved = {"save": tmp_path / "saved", "save_interval": 1000}
    long = {"train_iters": 100_000}
    with nodes(tmp_path, num_nodes=1, **long, **NEEDS_TWO, **saved, **SHARDED) as job:
        job.agents[0].send_signal(number)
        assert job.codes(0) == [ExitCode.DONE], job.words()
        assert f"{number.name} received: the job ends after iteration {job.steps()}" in job.log(0)
        tracker = tmp_path / "saved" / "latest_checkpointed_iteration.txt"
        assert tracker.read_text() == str(job.steps())
        end_at(job, job.steps())
        require_undisturbed(job, run_ranks)


NEEDS_ONE = {"hdp_tokens_per_rank": 100}


@pytest.mark.parametrize("needs", [NEEDS_ONE, NEEDS_TWO])
def test_the_only_host_is_drained_while_a_rank_is_lost(run_ranks, tmp_path, needs):
    """With too few ranks for a step the job waits for no others: it saves what it has."""
    saved = {"save": tmp_path / "saved", "save_interval": 1000_000}
    long = {"train_iters": 100_000}
    with nodes(tmp_path, num_nodes=1, **long, **needs, **saved, **SHARDED) as job:
        job.ranks(0)[0].kill()
        job.agents[0].send_signal(signal.SIGUSR1)
        code = ExitCode.DONE if needs is NEEDS_ONE else ExitCode.BLAMES_ANOTHER
        assert job.codes(0) == [code], job.words()
        if code:
            assert "the job is asked to end, with 1 HDP ranks of 2" in job.log(0)
        tracker = tmp_path / "saved" / "latest_checkpointed_iteration.txt"
        # a part of the optimizer was lost: a step back, that metrics had
        assert job.steps() - int(tracker.read_text()) in (0, 1)
        end_at(job, job.steps())
        require_undisturbed(job, run_ranks)


def test_spares_of_two_nodes(run_ranks, tmp_path):
    """Each takes the place of a rank on any node; a node that is lost takes its spare along."""
    with nodes(tmp_path, spares=1, train_iters=100_000, **NEEDS_TWO, **SHARDED) as job:
        job.until(lambda: "starts members 5" in job.log(0))
        job.ranks(1)[0].kill()
        job.until(lambda: "1 HDP ranks join" in job.log(0))
        behind = job.steps()
        job.until(lambda: job.steps() > behind + 3)
        job.send(1, signal.SIGKILL)
        job.until(lambda: "node 1 (host host-1) gave no sign of life" in job.log(0))
        behind = job.steps()
        job.until(lambda: job.steps() > behind + 3)
        job.agents[0].send_signal(signal.SIGTERM)
        assert job.codes(0) == [ExitCode.DONE], job.words()
        end_at(job, job.steps())
        require_undisturbed(job, run_ranks)
