"""Double rings on a model of ranks that run as threads: who meets whom, and on what links."""

import itertools
import queue
import random
import threading
from collections import Counter

import pytest
import torch

from megatron_hdp.planner.bounds import group_size
from megatron_hdp.runtime.ring.comm import RingComm
from megatron_hdp.runtime.ring.double_ring import Groups
from megatron_hdp.runtime.ring.layout import TokenLayout
from megatron_hdp.runtime.ring.travelling import (
    found_by_others,
    gradients_of,
    outputs_of,
    travelling,
)

WAIT_S = 120  # a busy machine may stand for seconds


class Wires:
    """What ranks send each other, in order, and how many bytes."""

    def __init__(self, ranks):
        # all made now: two threads that miss one at the same time would each make their own
        self.queues = {pair: queue.Queue() for pair in itertools.permutations(ranks, 2)}
        self.bytes = Counter()


class ModelComm(RingComm):
    """One rank's end: a message is there when it is sent; nobody waits for ever."""

    def __init__(self, wires, rank, ranks_per_node):
        super().__init__(None, ranks_per_node=ranks_per_node)
        self.wires, self.rank = wires, rank

    def _post(self, sends, receives, received):
        for tensor, peer in sends:
            self.wires.queues[self.rank, peer].put(tensor.clone())
            self.wires.bytes[self.rank, peer] += tensor.nbytes
            self.bytes_sent += tensor.nbytes
        return Arriving(self, receives, received)


class Arriving:
    def __init__(self, comm, receives, received):
        self.comm, self.receives, self.received = comm, receives, received
        for tensor, _ in receives:
            tensor.fill_(255)  # not there before the wait

    def wait(self):
        for tensor, peer in self.receives:
            tensor.copy_(self.comm.wires.queues[peer, self.comm.rank].get(timeout=WAIT_S))
        self.receives = ()
        return self.received


def run_ring(ring, ranks_per_node, body):
    """`body(comm, layout)` of every member, in threads: results in ring order, and the wires."""
    wires, results, problems = Wires(ring), {}, []

    def run(index):
        layout = TokenLayout(ring, index, (2,), ())
        try:
            results[index] = body(ModelComm(wires, ring[index], ranks_per_node), layout)
        except Exception as error:
            problems.append((index, repr(error)))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(ring))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    assert not problems and len(results) == len(ring), problems
    return [results[index] for index in range(len(ring))], wires


def mark(finder, owner):
    """What a member finds for another's block; a sum of them says which."""
    return 1.0 + 100.0 * finder + owner


def meet_all(comm, layout, kind=gradients_of):
    """Whose blocks pass, and the sum of what all others find for ours."""
    here = layout.index
    tensor = torch.full((3, 5), float(here), dtype=torch.float64)
    met = []

    def find(step, tensors):
        owner = (here - step) % layout.degree
        assert tensors[0].eq(owner).all()
        met.append(owner)

        def add(totals):
            totals[0] += mark(here, owner)

        return add

    blocks = travelling([tensor], layout, comm)
    assert next(blocks)[0] == 0
    found = found_by_others(blocks, kind([tensor]), layout, comm, find, tensor)
    assert next(blocks, None) is None
    return met, found[0].clone()


@pytest.mark.parametrize(
    "seed", [pytest.param(one, marks=[pytest.mark.slow] * (one > 8)) for one in range(25)]
)
def test_every_member_meets_all_others_once(seed):
    draw = random.Random(seed)
    size, number = draw.choice([2, 3, 4, 5]), draw.choice([2, 3, 4])
    nodes = draw.sample(range(9), number)
    per_node = size + draw.randint(0, 2)
    ring = tuple(node * per_node + place for node in nodes for place in range(size))
    results, wires = run_ring(ring, per_node, meet_all)
    everyone = range(len(ring))
    for index, (met, found) in enumerate(results):
        assert sorted([*met, index]) == list(everyone)
        assert found.eq(sum(mark(one, index) for one in everyone if one != index)).all()
    plain, _ = run_ring(ring, 0, meet_all)
    assert [found.tolist() for _, found in plain] == [found.tolist() for _, found in results]
    num_bytes = 3 * 5 * 8 * 2 * (len(ring) - 1)  # of blocks, and as many of what is found
    across = Counter()
    for (sender, receiver), sent in wires.bytes.items():
        if sender // per_node != receiver // per_node:
            across[sender] += sent
    total = {rank: sum(n for (one, _), n in wires.bytes.items() if one == rank) for rank in ring}
    assert set(total.values()) == {num_bytes}
    assert set(across.values()) == {3 * 5 * 8 * 2 * (number - 1)}  # on every link alike


def merge_all(comm, layout):
    """Shares of an output, where later members find nothing for the first rows of earlier ones."""
    here = layout.index
    like = [torch.zeros(2, 1, 1, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)]

    def find(step, tensors):
        owner = (here - step) % layout.degree

        def add(totals):
            rows = slice(0 if here < owner else 1, 2)
            weight = torch.full_like(totals[1][rows], float(here)).exp()
            out, lse = totals[0][rows], totals[1][rows]
            whole = lse.exp() + weight
            out.copy_((out * lse.exp()[..., None] + here * weight[..., None]) / whole[..., None])
            lse.copy_(whole.log())

        return add

    blocks = travelling([torch.zeros(1)], layout, comm)
    next(blocks)
    out, lse = found_by_others(blocks, outputs_of(like), layout, comm, find, like[0])
    return out.flatten().tolist(), lse.flatten().tolist()


def test_outputs_of_which_some_members_find_nothing_are_merged():
    ring = tuple(range(6))
    for number, (out, lse) in enumerate(run_ring(ring, 2, merge_all)[0]):
        others = torch.tensor([float(one) for one in ring if one != number]).double()
        before = others[others < number]
        for row, seen in enumerate((before, others)):
            if len(seen):
                assert out[row] == pytest.approx((seen * seen.softmax(0)).sum())
                assert lse[row] == pytest.approx(seen.logsumexp(0))
            else:
                assert (out[row], lse[row]) == (0.0, -float("inf"))


def test_a_lost_message_is_no_hang(monkeypatch):
    """The model of ranks sees it; a real one has the communicator's time-out."""
    monkeypatch.setattr("tests.runtime.ring.test_double_ring.WAIT_S", 0.5)
    monkeypatch.setattr(Groups, "peer", lambda self, groups, places: self.layout.ring[0])
    with pytest.raises(AssertionError, match="Empty"):
        run_ring(tuple(range(4)), 2, meet_all)


@pytest.mark.parametrize(
    "ring, size",
    [
        ((0, 1, 2, 3), 2),
        ((2, 3, 0, 1), 2),
        ((0, 2, 4), 1),
        ((0, 1, 2), 1),
        ((0, 1), 2),
        (tuple(range(16)), 2),
    ],
)
def test_groups_are_of_members_that_follow_each_other_in_a_node(ring, size):
    assert group_size(ring, 2) == size
    comm = RingComm(None, ranks_per_node=2)
    assert comm.group_size(ring) == (size if 1 < size < len(ring) else 0)
    assert RingComm(None).group_size(ring) == 0
