"""Ranks wait for each other, and stop with a message that says who holds what if they disagree."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_hdp.runtime.health.agreement import (
    DisagreementError,
    fingerprint,
    meet,
    require_agreement,
)
from megatron_hdp.runtime.timeline import MEETING, Timeline

BIG = 2**64 - 1


def agree(values):
    facts = {"plan": values[dist.get_rank()], "lengths": BIG}
    try:
        require_agreement(facts, torch.device("cpu"))
    except DisagreementError as error:
        return str(error)
    return None


@pytest.mark.parametrize("values", [[0, 0, BIG], [5, 6, 5], [2**63, 2**63 - 1, 2**63]])
def test_one_other_value_stops_every_rank(run_ranks, values):
    assert run_ranks(3, agree, values[:1] * 3) == [None] * 3
    messages = run_ranks(3, agree, values)
    assert len(set(messages)) == 1
    assert "plan: " in messages[0] and "lengths" not in messages[0].split("expected")[0]
    odd = next(rank for rank in range(3) if values.count(values[rank]) == 1)
    assert f"{values[odd]:#018x} on rank {odd}" in messages[0]


def test_fingerprint_tells_parts_apart():
    assert fingerprint("ab", "c") != fingerprint("a", "bc")
    assert fingerprint(1, 2.5, None) == fingerprint(1, 2.5, None)
    assert 0 <= fingerprint(b"x") < 2**64


def meetings():
    """Body of a rank: whether it came out of the first of two meetings after the last one came."""
    timeline, store = Timeline(), distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        time.sleep(0.3)
        store.add("the last one comes", 1)
    meet(timeline)
    was_there = store.add("the last one comes", 0)
    meet(timeline)
    assert not any(kind == MEETING for kind, _, _ in timeline.current())
    return was_there


def test_all_wait_for_the_last(run_ranks):
    assert run_ranks(3, meetings) == [1, 1, 1]
    assert run_ranks(1, meetings) == [0]  # alone nobody is waited for
