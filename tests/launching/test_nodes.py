"""Agents of two nodes: ranks are replaced where they died, silent nodes are lost, and fenced.

Agents are forked as `tests.support.ranks` forks ranks; the ranks are little programs, for which the
test says in the store what training would.
"""

import json
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from megatron_hdp.cli.launch import first_node, place_of
from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.launching import Agent, LaunchPlan, NodeAgent, agent, node_agent, wire
from megatron_hdp.launching.agent import places_in
from megatron_hdp.launching.other_nodes import OtherNodes
from megatron_hdp.launching.wire import Arrival, Order, Told
from megatron_hdp.processes.ports import free_port
from megatron_hdp.runtime.epochs import Epoch, Terms, keys
from tests.support import ranks

RANK = f"""\
import os, signal, time
NAMES = "{keys.HOST}", "GROUP_RANK", "{keys.PLACE}"
open(os.environ["FOLDER"] + "/rank-" + os.environ["{keys.MEMBER}"], "w").write(
    " ".join([str(os.getpid())] + [os.environ[name] for name in NAMES])
    + chr(10))
if os.path.exists(os.environ["FOLDER"] + "/joiners-wait") and "{keys.JOINS}" in os.environ:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as one that waits in its store
    time.sleep(600)
while not os.path.exists(os.environ["FOLDER"] + "/end"):
    if os.path.exists(os.environ["FOLDER"] + "/mistake-" + os.environ["{keys.MEMBER}"]):
        os._exit(2)
    time.sleep(0.02)
"""
COMMAND = (sys.executable, "-S", "-c", RANK)
TIMEOUT_S = 6.0


def agent_main(plan, host, folder):
    agent.GRACE_S = node_agent.GRACE_S = 600.0  # who is asked to end, ends
    output = os.open(folder / f"log-{plan.node_rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 2)
    os.environ |= {keys.HOST: host, "FOLDER": str(folder)}
    code = Agent(plan).run() if plan.node_rank == 0 else NodeAgent(plan).run()
    sys.stderr.flush()
    os._exit(code)


class Job:
    """Two nodes of a rank each, and what a test says in the place of their ranks."""

    def __init__(self, folder, timeout_s):
        self.folder, self.port, self.agents = folder, free_port(), {}
        self.timeout_s = timeout_s

    def start(self, node):
        plan = LaunchPlan(
            COMMAND,
            1,
            "127.0.0.1",
            self.port,
            10,
            2,
            node,
            node_timeout_s=self.timeout_s,
            join_s=120.0,
        )
        process = ranks._context.Process(
            target=agent_main, args=(plan, f"host-{node}", self.folder)
        )
        process.start()
        self.agents[node] = process

    def survives(self, least):
        """Its ranks run, and say so; `least` None: they do not."""
        self.until(lambda: self.rank(0) and self.rank(1))
        if least is None:
            return
        self.store = dist.TCPStore(
            "127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=30)
        )
        self.store.set(keys.TERMS, Terms(least, 1, 1, 60.0).to_json())
        self.until(lambda: "survives the loss" in self.log(0))

    def rank(self, member):
        """Process, host, node and place of a rank; None: it never ran."""
        path = self.folder / f"rank-{member}"
        words = path.read_text() if path.exists() else ""
        return words.split() if words.endswith("\n") else None

    def kill(self, member):
        os.kill(int(self.rank(member)[0]), signal.SIGKILL)

    def lives(self, member):
        try:
            return psutil.Process(int(self.rank(member)[0])).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def log(self, node):
        path = self.folder / f"log-{node}"
        return path.read_text() if path.exists() else ""

    def members(self, epoch):
        self.until(lambda: self.store.check([keys.members(epoch)]))
        return Epoch.from_json(self.store.get(keys.members(epoch))).members

    def joins(self, member, behind):
        """A joiner is ready, and all leave the epoch for it."""
        self.until(lambda: self.rank(member))
        self.store.set(keys.ready(member), b"1")
        self.leave(behind)

    def leave(self, epoch):
        self.until(lambda: self.store.check([keys.news(epoch, self.members(epoch)[0], 0)]))
        for one in self.members(epoch):
            self.store.set(keys.vote(epoch, one), json.dumps({}))

    def until(self, is_so, timeout_s=120):
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < deadline, self.log(0) + "---\n" + self.log(1)
            time.sleep(0.02)

    def codes(self, *nodes):
        self.until(lambda: all(self.agents[one].exitcode is not None for one in nodes))
        return [self.agents[one].exitcode for one in nodes]

    def end(self):
        """The ranks have done all; what the agents return."""
        (self.folder / "end").touch()
        return self.codes(0, 1)


@contextmanager
def two_nodes(folder, timeout_s=TIMEOUT_S, least=1):
    job = Job(folder, timeout_s)
    with ranks._server_environment():
        try:
            job.start(0)
            job.start(1)
            job.survives(least)
            yield job
        finally:
            for agent in job.agents.values():
                agent.kill()
                agent.join()
            (folder / "end").touch()
    members = [path.name.split("-")[1] for path in folder.glob("rank-*")]
    # the kernel kills them, each when it next has the CPU
    job.until(lambda: not any(map(job.lives, members)), timeout_s=60)


def test_a_rank_is_replaced_on_the_node_that_lost_it(tmp_path):
    with two_nodes(tmp_path, timeout_s=30.0) as job:  # a busy machine may stand for seconds
        assert [job.rank(one)[1:] for one in (0, 1)] == [["host-0", "0", "0"], ["host-1", "1", "1"]]
        job.kill(1)
        assert job.members(1) == (0,)
        job.joins(2, behind=1)
        assert job.members(2) == (0, 2)
        assert job.rank(2)[1:] == ["host-1", "1", "1"]
        assert job.end() == [ExitCode.DONE, ExitCode.DONE], job.log(0) + job.log(1)


@pytest.mark.slow
def test_a_node_is_lost_and_comes_back(tmp_path):
    with two_nodes(tmp_path) as job:
        job.agents[1].kill()
        job.until(lambda: not job.lives(1), timeout_s=TIMEOUT_S / 2)  # with its agent, at once
        job.start(1)  # before anybody knows
        assert job.members(1) == (0,)
        assert "node 1 (host host-1) gave no sign of life for 6 s" in job.log(0)
        job.joins(2, behind=1)
        assert job.members(2) == (0, 2)
        assert job.rank(2)[1] == "host-1"
        os.kill(job.agents[1].pid, signal.SIGTERM)  # its agent knows, too, that the job survives
        job.leave(2)
        assert job.members(3) == (0,) and job.lives(2)
        job.kill(2)
        assert job.end() == [ExitCode.DONE, ExitCode.DONE], job.log(0) + job.log(1)


@pytest.mark.slow
def test_an_agent_that_stood_still_is_fenced(tmp_path):
    with two_nodes(tmp_path) as job:
        os.kill(job.agents[1].pid, signal.SIGSTOP)
        assert job.members(1) == (0,)
        assert job.lives(1)
        os.kill(job.agents[1].pid, signal.SIGCONT)
        assert job.codes(1) == [ExitCode.BLAMES_ANOTHER]
        assert not job.lives(1)
        assert "were killed, and write nothing more" in job.log(1)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_all_end_with_the_first_agent(tmp_path, how):
    with two_nodes(tmp_path) as job:
        os.kill(job.agents[0].pid, how)
        assert job.codes(1) == [ExitCode.BLAMES_ANOTHER]
        assert not job.lives(1)
        said = [line for line in job.log(1).splitlines() if line.startswith("megatron-hdp launch")]
        assert len(said) == 1 and "first node's agent" in said[0], said


@pytest.mark.slow
def test_a_node_that_is_told_to_go_leaves_behind_the_step(tmp_path):
    with two_nodes(tmp_path) as job:
        os.kill(job.agents[1].pid, signal.SIGTERM)
        job.leave(0)
        assert job.members(1) == (0,)
        assert "SIGTERM" in Epoch.from_json(job.store.get(keys.members(1))).why
        job.kill(1)  # it reads that it is not named, and ends
        assert job.codes(1) == [ExitCode.DONE]
        (tmp_path / "end").touch()
        assert job.codes(0) == [ExitCode.DONE], job.log(0)


@pytest.mark.slow
def test_a_node_that_is_needed_does_not_leave(tmp_path):
    with two_nodes(tmp_path, least=2) as job:
        os.kill(job.agents[1].pid, signal.SIGTERM)
        job.until(lambda: "too few HDP ranks would be left" in job.log(0))
        job.until(lambda: not job.lives(0))  # SIGTERM, at which a rank that trains saves


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 1])
def test_who_waits_to_join_holds_up_no_end(tmp_path, node):
    (tmp_path / "joiners-wait").touch()
    with two_nodes(tmp_path) as job:
        job.kill(node)
        job.members(1)
        job.until(lambda: job.rank(2))
        assert job.end() == [ExitCode.DONE, ExitCode.DONE]
        assert not job.lives(2)


@pytest.mark.slow
def test_all_are_let_go_behind_a_mistake_of_one(tmp_path):
    with two_nodes(tmp_path) as job:
        (tmp_path / "mistake-1").touch()
        job.store.wait([keys.members(1)], timedelta(seconds=120))
        assert job.codes(0, 1) == [ExitCode.MISTAKE, ExitCode.MISTAKE]
        assert "member 1 ended with exit code 2: the job ends" in job.log(0)


@pytest.mark.slow
def test_without_survival_all_nodes_end_with_the_first_rank_that_fails(tmp_path):
    with two_nodes(tmp_path, least=None) as job:
        job.kill(1)
        assert job.codes(0, 1) == [ExitCode.FAILED, ExitCode.FAILED]
        assert "member 1 was killed by SIGKILL: the job ends" in job.log(0)


class Others:
    """What the first node's agent knows of two others, with a clock that stands."""

    def __init__(self):
        self.store, self.said, self.now = dist.HashStore(), [], 0.0
        self.nodes = OtherNodes(
            self.store, Arrival("a", 3, 2), 10.0, self.said.append, lambda: self.now
        )

    def comes(self, node, host, num_ranks=2):
        turn = self.store.add(wire.turns(node), 1)
        self.store.set(wire.arrival(node, turn), Arrival(host, 3, num_ranks).to_json())
        self.store.add(wire.BELL, 1)
        self.nodes.look()
        return turn

    def passes(self, seconds, *beating):
        """Time, in which agents live; returns nodes that are lost."""
        lost = []
        for _ in range(seconds):
            self.now += 1.0
            for node, turn in beating:
                self.store.add(wire.alive(node, turn), 1)
            lost += self.nodes.look()
        return [node.number for node in lost]

    def latest_order(self, node, turn):
        number = 0
        while self.store.check([wire.order(node, turn, number)]):
            number += 1
        return Order.from_json(self.store.get(wire.order(node, turn, number - 1)))


def test_all_of_a_silent_node_is_lost_at_once():
    job = Others()
    job.comes(1, "b"), job.comes(2, "c")
    assert not job.nodes.missing
    node = job.nodes.present[1]
    for member in (2, 3):
        node.start(member, member - 2, {"RANK": str(member)})
    assert job.latest_order(1, 1).environment == {"RANK": "3"} and node.free_slots() == []
    assert job.passes(30, (1, 1), (2, 1)) == []
    assert job.passes(12, (2, 1)) == [1]
    assert [ended.member for ended in node.ended()] == [2, 3]
    assert node.why_lost == "node 1 (host b) gave no sign of life for 10 s"
    assert job.nodes.missing == [1] and job.latest_order(1, 1).what == "give_up"


def test_what_an_agent_tells_is_heard_once():
    job = Others()
    job.comes(1, "b")
    node = job.nodes.present[1]
    node.start(2, 0, {})
    job.store.set(wire.told(1, 1, 0), Told("ended", 2, 1).to_json())
    job.store.set(wire.told(1, 1, 1), Told("signal", number=signal.SIGTERM).to_json())
    job.nodes.look()
    assert node.ended() == []  # nobody rang
    job.store.add(wire.BELL, 1)
    job.nodes.look()
    assert [(one.member, one.code) for one in node.ended()] == [(2, 1)]
    assert node.ended() == [] and node.signals == [signal.SIGTERM] and node.free_slots() == [0, 1]


def test_a_second_agent_of_a_node_waits_for_the_end_of_the_first():
    job = Others()
    first, second = job.comes(1, "b"), job.comes(1, "d")
    assert job.nodes.present[1].turn == first
    assert job.passes(12) == [1]
    assert job.nodes.present[1].turn == second and job.nodes.present[1].arrival.host == "d"


def test_a_second_agent_of_a_node_that_lives_is_refused():
    job = Others()
    job.comes(1, "b"), job.comes(1, "d")
    assert job.passes(12, (1, 1)) == []
    order = job.latest_order(1, 2)
    assert (order.what, order.number) == ("end", ExitCode.MISTAKE)
    assert "found --node-rank 1, which the agent on host b has" in order.why


def test_a_node_of_another_size_is_refused():
    job = Others()
    job.comes(1, "b", num_ranks=4)
    found = "found --nnodes 3 --nproc-per-node 4 --spares-per-node 0 on node 1 (host b)"
    assert found in job.nodes.misfit
    assert job.latest_order(1, 1).number == ExitCode.MISTAKE and 1 in job.nodes.missing


def test_an_agent_leaves_no_thread_in_the_store():
    """One that the store lets go while Python ends aborts the process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set(wire.order(1, 1, 0), Order("end", number=7).to_json())
    plan = LaunchPlan(COMMAND, 1, "127.0.0.1", store.port, 0, num_nodes=2, node_rank=1)
    assert NodeAgent(plan).run() == 7
    assert "node-agent" not in [thread.name for thread in threading.enumerate()]
    assert Told.from_json(store.get(wire.told(1, 1, 0))).what == "bye"


@pytest.mark.parametrize(
    ("free", "replica", "stages", "places", "hdp_ranks"),
    [
        ({0: [1], 1: [0, 3]}, 2, 1, [(1, 0), (1, 3)], 1),
        ({0: [1], 1: [0]}, 2, 1, None, 1),
        ({0: [1], 1: [0]}, 2, 2, [(0, 1), (1, 0)], 1),
        ({0: [0, 1], 1: [0, 1]}, 4, 2, [(0, 0), (0, 1), (1, 0), (1, 1)], 1),
        ({0: [0, 1], 1: [0, 1, 2, 3]}, 4, 2, [(1, 0), (1, 1), (1, 2), (1, 3)], 1),
        ({0: [0], 1: [0], 2: [0, 1]}, 4, 2, None, 1),
        ({0: [0, 1, 2], 1: [0, 1, 2]}, 4, 1, [(0, 0), (0, 1), (1, 0), (1, 1)], 2),
    ],
)
def test_what_joins_together_is_started_close_together(free, replica, stages, places, hdp_ranks):
    assert places_in(free, replica, stages, hdp_ranks) == places


SLURM = {"SLURM_NODEID": "2", "SLURM_JOB_NODELIST": "n[03-05]-ib,m1", "SLURM_JOB_ID": "1234567"}


def test_the_place_of_a_node():
    assert place_of(1, None, None, SLURM) == (0, "127.0.0.1", 0)
    assert place_of(3, None, None, SLURM) == (2, "n03-ib", 24567)
    assert place_of(3, 1, "a:7", SLURM) == (1, "a", 7)
    assert place_of(3, None, "a:7", {"GROUP_RANK": "1"}) == (1, "a", 7)
    assert first_node("a3,a4") == "a3"
    for given, words in (
        ((2, None, "a:7"), "found no --node-rank"),
        ((2, 1, None), "found no --rdzv-endpoint"),
        ((2, 2, "a:7"), "found --node-rank 2, expected 0 to 1"),
        ((2, 0, "a:0"), "expected HOST:PORT"),
        ((1, 0, "a"), "expected HOST:PORT"),
    ):
        with pytest.raises(ValueError, match=words):
            place_of(*given, {})
