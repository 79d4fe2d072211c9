"""Where a rank fails inside a session's call, or hangs there, all ranks say so and none waits on.

It is over within seconds; a collective would wait for minutes.
"""

import os
import threading
import time

import pytest
import torch

from megatron_hdp.megatron import parallel
from megatron_hdp.session import FromHidden
from tests.support.own_loop import arguments_of, batch_of, session_of
from tests.support.ranks import RankError

LENGTHS = (7, 5, 30, 200)  # the last one needs a ring of both ranks


class Planted(torch.autograd.Function):
    """Nothing in forward, a fault of one rank's in backward."""

    @staticmethod
    def forward(context, hidden, act):
        context.act = act
        return hidden.clone()

    @staticmethod
    def backward(context, gradient):
        if torch.distributed.get_rank() == 1:
            context.act()
        return gradient, None


def fail():
    raise RuntimeError("planted\nsecond line")


def stand_still():
    time.sleep(600)


def step_with(act, folder, **options):
    """Two steps without the fault and one with it; what this rank raises there and afterwards."""
    output = os.open(folder / f"rank-{torch.distributed.get_rank()}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 2)
    arguments, batch = arguments_of(**options), batch_of(LENGTHS)
    parallel.initialise(arguments)
    session, raised = session_of(arguments), []
    for one in (lambda: None, lambda: None, act, lambda: None):
        loss = FromHidden(lambda h, _, one=one: Planted.apply(h, one).square().sum(-1))
        try:
            session.step(batch, loss)
        except RuntimeError as error:
            raised.append(error)
            os.write(output, f"{type(error).__name__}: {error}\n".encode())
    session.close()
    left = [one.name for one in threading.enumerate() if one.name.startswith("heartbeat-w")]
    os.write(output, f"{len(raised)} raised, left: {left}\n".encode())


def test_who_fails_in_backward_raises_and_the_others_name_it_and_end(run_ranks, tmp_path):
    with pytest.raises(RankError, match="died with exit code 3 before it returned") as caught:
        run_ranks(2, step_with, fail, tmp_path, timeout_s=200)
    assert caught.value.tracebacks.keys() == {0}
    other, own = ((tmp_path / f"rank-{rank}").read_text() for rank in (0, 1))
    assert "error on rank 0: rank 1 (host " in other and "failed: RuntimeError: planted" in other
    assert own.startswith(
        "RuntimeError: planted\nsecond line\nRankFailure: the session has ended"
    ), own
    assert "2 raised, left: []" in own


@pytest.mark.slow
def test_stall_timeout_seconds_ends_a_call_in_which_a_rank_hangs(run_ranks, tmp_path):
    with pytest.raises(RankError, match="died with exit code 3 before it returned"):
        run_ranks(2, step_with, stand_still, tmp_path, timeout_s=200, stall_timeout_seconds=3.0)
    text = (tmp_path / "rank-0").read_text()
    assert "stalled while 1 of 2 ranks wait: rank 1 (host " in text and "stand_still" in text
