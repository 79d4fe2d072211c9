"""Megatron-LM's own loop on two nodes: one is lost and comes back, or is drained.

Needs MEGATRON_LM_PATH, see `test_training`.
"""

import signal

import pytest

from megatron_hdp.exit_codes import ExitCode
from tests.megatron.lm.runs import LENGTHS, MARKS, OVERLAPPED, drive
from tests.megatron.lm.test_lost_rank import lines_of, surviving
from tests.support.gradients import write_corpus
from tests.training.test_lost_node import Nodes, begun

pytestmark = [*MARKS, pytest.mark.slow]
FEW, MANY = 20, 400
"""Steps, of a job that waits for a node and of one that is told to end."""


def on_two_nodes(folder, steps):
    """A job of two nodes of two ranks each, three of which a step needs."""
    write_corpus(folder, LENGTHS)
    run = surviving(folder, "nodes", OVERLAPPED, tokens="100", steps=steps, seldom=True)
    return begun(Nodes(folder / "nodes", ["megatron_hdp", "run", run["script"], *run["arguments"]]))


def require_undisturbed(folder):
    """Each step once, as a rank that sees whole batches has it."""
    found = lines_of(folder, "nodes")
    one = surviving(folder, "one", ranks=1, tokens="256", steps=len(found), seldom=True)
    drive(folder, [one])
    expected = lines_of(folder, "one")
    assert [one["step"] for one in found] == [one["step"] for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one["consumed_tokens"] == other["consumed_tokens"]
        for key in ("loss", "grad_norm"):
            assert one[key] == pytest.approx(other[key], rel=1e-4), (one["step"], key)


def test_a_node_is_lost_and_comes_back(tmp_path):
    """With one alone the longest sequence has no room, so that the job waits for the other."""
    with on_two_nodes(tmp_path, FEW) as job:
        job.send(1, signal.SIGKILL)
        job.agents[1].wait()
        job.until(lambda: "2 HDP ranks are left, a step needs 3" in job.log(0))
        job.start(1)
        assert job.codes(0, 1) == [ExitCode.DONE, ExitCode.DONE], job.words()
        assert "node 1 (host host-1) gave no sign of life" in job.log(0)
    require_undisturbed(tmp_path)
