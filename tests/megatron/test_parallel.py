"""What ranks tell each other of their groups, whatever the size of the job."""

import pickle
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_hdp.megatron import parallel

ARGUMENTS = SimpleNamespace(hdp_ring_max_ctas=16)


def told(monkeypatch, groups):
    """What the first group's rank tells all, and the lists that communicators are made of."""
    sent, made = [], []

    def gathered(mine):
        sent.append(mine)
        return [parallel._members(group) for group in groups for _ in group]

    def new_ring_group(lists, timeout, device, max_ctas, tell):
        made.extend(lists)
        return "communicator"

    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: groups[0])
    monkeypatch.setattr(parallel, "communication_minutes", lambda arguments: 1)
    monkeypatch.setattr(parallel.parallel_state, "get_data_parallel_group", lambda: "group")
    monkeypatch.setattr(parallel, "gathered", gathered)
    monkeypatch.setattr(parallel, "new_ring_group", new_ring_group)
    monkeypatch.setattr(parallel, "RingComm", lambda group, timeline: group)
    assert parallel.new_ring_comm(ARGUMENTS, None) == "communicator"
    return len(pickle.dumps(sent)), [list(one) for one in made]


@pytest.mark.parametrize("tensor_ranks", [1, 8])
def test_it_does_not_grow_with_the_group(monkeypatch, tensor_ranks):
    def groups(ranks):
        return [list(range(first, ranks, tensor_ranks)) for first in range(tensor_ranks)]

    few, lists = told(monkeypatch, groups(64))
    assert lists == groups(64)
    many, lists = told(monkeypatch, groups(4096))
    assert lists == groups(4096)
    assert few <= many <= few + 8  # the digits of a number


@pytest.mark.parametrize("group", [[5], [0, 1, 3], [4, 2], [3, 1, 0]])
def test_any_group_is_told_as_it_is(group):
    assert list(parallel._members(group)) == group
