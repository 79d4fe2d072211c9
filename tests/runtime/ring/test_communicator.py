"""The rings' communicator: what NCCL is asked for, and who is connected before the first step."""

from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_hdp.planner import CostModel, plan
from megatron_hdp.planner.network import Nccl
from megatron_hdp.runtime.ring import communicator
from megatron_hdp.runtime.ring.communicator import (
    connect_counterparts,
    counterpart_rounds,
    neighbour_rounds,
    new_ring_group,
)

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 7, 8, 12, 48, 64, 1000, 1024])
def test_rounds(num_ranks):
    rounds = neighbour_rounds(num_ranks)
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks), "a rank has one partner in a round"
        assert all(0 <= a < b < num_ranks for a, b in pairs)
    everything = [pair for pairs in rounds for pair in pairs]
    assert len(set(everything)) == len(everything)
    assert {(rank, rank + 1) for rank in range(num_ranks - 1)} <= set(everything)
    assert len(everything) <= 1.5 * num_ranks


def test_how_many_connections_1024_ranks_make():
    rounds = neighbour_rounds(1024)
    peers = np.bincount(np.array([pair for pairs in rounds for pair in pairs]).flatten())
    assert (len(rounds), int(peers.sum()) // 2, int(peers.max())) == (11, 1534, 10)


def test_rings_of_plans_meet_few_others():
    """Of the pairs that sixty steps over 64 ranks bring together, nearly all are connected."""
    connected = {pair for pairs in neighbour_rounds(64) for pair in pairs}
    random = np.random.default_rng(0)
    model = CostModel.of_tensor_ranks(
        1, num_layers=32, hidden_size=4096, num_parameters=7 * 10**9, kv_bytes_per_token=131072
    )
    met, num_others, num_messages = set(), 0, 0
    for _ in range(60):
        lengths = np.minimum(random.lognormal(7.2, 1.9, 700).astype(np.int64) + 1, 262_144)
        made = plan(lengths, ranks=64, tokens_per_rank=16384, cost_model=model)
        for m in range(made.num_micro_batches):
            ring = made.micro_batch(m).ranks
            if len(ring) == 1:
                continue
            for a, b in zip(ring, ring[1:] + ring[:1], strict=True):
                pair = min(a, b), max(a, b)
                met.add(pair)
                num_messages += 1
                num_others += pair not in connected
    assert num_messages > 1000 and num_others <= 0.001 * num_messages, (num_others, num_messages)
    assert len(met - connected) <= 2


@pytest.mark.parametrize(("num_ranks", "of_node"), [(8, 8), (12, 4), (14, 4), (64, 8)])
def test_counterparts_in_the_next_node(num_ranks, of_node):
    """All that double rings over neighbouring nodes, and over all of them, send to."""
    rounds = counterpart_rounds(num_ranks, of_node)
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks), "a rank has one partner in a round"
    found = {pair for pairs in rounds for pair in pairs}
    last = num_ranks // of_node * of_node
    assert {(rank, rank + of_node) for rank in range(last - of_node)} <= found
    assert {(rank, last - of_node + rank) for rank in range(of_node) if last > of_node} <= found
    assert all(b < last and (b - a) % of_node == 0 for a, b in found)


def connected():
    """Body of a rank: whom it has talked to when the communicator is there."""
    exchange = dist.batch_isend_irecv
    with mock.patch.object(dist, "batch_isend_irecv", wraps=exchange) as noted:
        group = new_ring_group([list(range(dist.get_world_size()))], timedelta(seconds=60))
        connect_counterparts(group, 2)
    return [call.args[0][0].group_peer for call in noted.call_args_list]


def test_all_neighbours_are_connected_at_start(run_ranks):
    """By two in a node, which leaves the last one alone."""
    talked = run_ranks(5, connected)
    assert talked == [[1, 3, 4, 2], [0, 2, 3], [3, 1, 0], [2, 4, 0, 1], [3, 0]]


class Options:
    """As `torch.distributed.ProcessGroupNCCL.Options`, which a torch for CPUs lacks."""

    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=-(2**31))
        self._timeout = timedelta(minutes=10)


@pytest.mark.parametrize(("backend", "max_ctas"), [("nccl", 16), ("nccl", 0), ("gloo", 16)])
def test_what_nccl_is_asked_for(monkeypatch, backend, max_ctas):
    made = []

    def new_group(ranks, timeout=None, backend=None, pg_options=None):
        made.append((ranks, timeout, pg_options))
        return group

    group = mock.Mock()
    group.size.return_value = 2
    of_torch = {
        "ProcessGroupNCCL": SimpleNamespace(Options=Options),
        "get_backend": lambda: backend,
        "get_rank": lambda: 1,
        "new_group": new_group,
        "all_reduce": mock.Mock(side_effect=AssertionError("it would connect collectives")),
    }
    monkeypatch.setattr(communicator, "connect_neighbours", lambda group, device: None)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    monkeypatch.setattr(communicator.nccl_channels, "widen", lambda config, version: f"{version}")
    timeout, told = timedelta(minutes=7), []
    with mock.patch.multiple(dist, create=True, **of_torch):
        args = ([[0, 2], [1, 3]], timeout, CUDA, max_ctas)
        assert new_ring_group(*args, tell=told.append) == group
    made_by = [
        mock.call._get_backend(CUDA),
        mock.call._get_backend().eager_connect_single_device(CUDA),
    ]
    assert group.mock_calls == ([mock.call.size(), *made_by] if backend == "nccl" else [])
    assert told == (["rings' communicator: (2, 30, 7)"] if backend == "nccl" else [])
    assert [ranks for ranks, _, _ in made] == [[0, 2], [1, 3]]
    assert made[0][2] is not made[1][2] or backend == "gloo", "each group keeps its own"
    for _, found, options in made:
        assert found == timeout
        if backend == "gloo":
            assert options is None
            continue
        assert options.is_high_priority_stream and options._timeout == timeout
        assert options.config.max_ctas == (max_ctas or -(2**31))


@pytest.mark.parametrize(
    ("said", "expected"), [("maxP2pPeers 8", True), ("NCCL's own number of channels", False)]
)
def test_the_nccl_of_this_process(monkeypatch, said, expected):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7, ""))
    monkeypatch.setattr(communicator.nccl_channels, "widen", lambda config, version: said)
    of_torch = {"ProcessGroupNCCL": SimpleNamespace(Options=Options)}
    with mock.patch.multiple(dist, create=True, **of_torch):
        assert communicator.running_nccl(16) == Nccl((2, 30, 7), expected, 16)
        monkeypatch.setenv("NCCL_NCHANNELS_PER_NET_PEER", "8")
        assert communicator.running_nccl(16) is None
