"""What the planner answers is small when it is sent, and the same when it arrives."""

import pickle
from dataclasses import replace

import pytest

from megatron_hdp.data.steps import RankStep
from megatron_hdp.data_plane.roles import Answer
from tests.support.rank_steps import differences, rank_steps


@pytest.fixture(scope="module")
def answer():
    steps = rank_steps([40, 7, 90, 300, 8, 8, 8, 120] * 8, ranks=8, tokens_per_rank=512)
    serving = {"pages": ("first", "second"), "böcker": ("third",)}
    shares = [one.share for one in steps]
    return Answer(3, steps[0].totals, shares, serving, {"pages": 2, "böcker": 1})


def test_it_arrives_as_it_was_sent(answer):
    found = pickle.loads(pickle.dumps(answer, protocol=5))
    assert replace(found, shares=[]) == replace(answer, shares=[])
    for one, other in zip(found.shares, answer.shares, strict=True):
        steps = (RankStep(answer.totals, share, ()) for share in (one, other))
        assert differences(*steps) == []


def test_it_is_no_larger_than_its_shares(answer):
    message = pickle.dumps(answer, protocol=5)
    arrays = [array for one in answer.shares for array in list(vars(one).values())[3:]]
    assert len(message) < sum(one.nbytes for one in arrays)
