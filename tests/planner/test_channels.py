"""What NCCL's rules give two neighbours of a ring, and the bandwidths that plans then have."""

from dataclasses import replace
from importlib import metadata

import pytest

from megatron_hdp.planner import LLAMA_7B
from megatron_hdp.planner.network import Nccl, channels_of_a_pair, following

V27, V28, V29, V30 = (2, 27, 7), (2, 28, 9), (2, 29, 7), (2, 30, 7)
SIZES = [2**power for power in range(3, 15)]  # 8 to 16,384


@pytest.mark.parametrize("version", [V28, V29, V30])
def test_a_pair_has_four_channels_and_more_at_every_size(version):
    found = {ranks: channels_of_a_pair(version, ranks, 8, max_ctas=16) for ranks in SIZES}
    assert min(found.values()) >= 4 and found[8] == 16


@pytest.mark.parametrize(
    ("version", "max_ctas", "expected"),
    [  # 8, 16, 32, 64, 128, 256 ranks
        (V27, 16, [16, 2, 2, 1, 1, 1]),
        (V28, 16, [16, 2, 2, 1, 1, 1]),
        (V28, 0, [32, 2, 2, 2, 1, 1]),
        (V29, 16, [16, 4, 4, 2, 1, 1]),
        (V30, 16, [16, 4, 4, 2, 1, 1]),
        (V30, 0, [32, 4, 4, 4, 2, 1]),
    ],
)
def test_what_nccl_does_by_itself(version, max_ctas, expected):
    """Of the communicator of all ranks: why it is asked for more."""
    found = [
        channels_of_a_pair(version, ranks, 8, max_ctas=max_ctas, is_widened=False)
        for ranks in SIZES[:6]
    ]
    assert found == expected


def test_the_network_decides_how_many():
    fast = {"net_gb_per_s": 100, "num_nics": 1}
    assert channels_of_a_pair(V30, 4096, 8, max_ctas=16, **fast) == 8
    assert channels_of_a_pair(V30, 4096, 8, max_ctas=16, net_gb_per_s=25, num_nics=1) == 2
    assert channels_of_a_pair(V27, 4096, 8, max_ctas=16, num_nics=2) == 2


ASKS, OLD, PLAIN = Nccl(V30, True, 16), Nccl(V27, False, 16), Nccl(V30, False, 16)


def costs(intra, inter, channels=0, **others):
    bandwidths = {"intra_node_bytes_per_s": 1e9 * intra, "inter_node_bytes_per_s": 1e9 * inter}
    return replace(LLAMA_7B, channels=channels, **bandwidths, **others)


@pytest.mark.parametrize(
    ("nccl", "ranks", "given", "expected"),
    [  # channels, as test_what_nccl_does_by_itself says
        (ASKS, 8, costs(300, 50), (300, 50)),  # 16
        (ASKS, 1024, costs(300, 50), (80, 50)),  # 4
        (OLD, 8, costs(300, 50), (300, 50)),  # 16
        (OLD, 16, costs(300, 50), (40, 28)),  # 2
        (OLD, 64, costs(300, 50), (20, 14)),  # 1
        (OLD, 64, costs(10, 5), (10, 5)),  # slower by itself
        (OLD, 1, costs(300, 50), (300, 50)),
        (None, 64, costs(300, 50), (300, 50)),
        (PLAIN, 16, costs(250, 250, channels=16), (80, 62.5)),  # profiled on one node
        (PLAIN, 16, costs(95, 70, channels=4), (95, 70)),  # with as many channels
        (PLAIN, 16, costs(30, 20, channels=2), (30, 20)),  # with fewer
        (PLAIN, 128, costs(160, 48, channels=4), (40, 14)),  # one channel carried more
    ],
)
def test_bandwidths_follow_the_channels(nccl, ranks, given, expected):
    found = following(given, nccl, ranks)
    assert found == following(found, nccl, ranks)
    in_gb = found.intra_node_bytes_per_s / 1e9, found.inter_node_bytes_per_s / 1e9
    assert in_gb == expected
    assert bool(found.slowed) == (found != given)
    kept = {"intra_node_bytes_per_s", "inter_node_bytes_per_s", "channels", "slowed"}
    assert {name for name, one in vars(given).items() if vars(found)[name] != one} <= kept


def test_gpus_of_a_rank_send_side_by_side():
    given = costs(8 * 300, 8 * 50, ranks_per_node=1)
    found = following(given, OLD, 64, tensor_ranks=8)
    assert found.inter_node_bytes_per_s == 8 * 14e9


def test_who_reads_a_slowed_cost_model_says_why():
    found = following(costs(300, 50), OLD, 64)
    assert found.warning == (
        "note: rings are planned at 20 GB/s within a node instead of 300 and 14 GB/s between nodes "
        "instead of 50 (NCCL 2.27.7 gives two of 64 HDP ranks 1 channel; it gives 4 from 2.28 on)"
    )
    assert "torch gives 4 from 2.13 on" in following(costs(300, 50), PLAIN, 64).slowed
    assert "2 channels; it gives" in following(costs(300, 14), OLD, 16).slowed
    assert " between nodes" not in following(costs(300, 14), OLD, 16).slowed
    both = replace(found, doubt="six processes").warning
    assert "--force: six processes; rings are planned at 20 GB/s" in both


def test_channels_by_size_in_words():
    assert ASKS.by_size() == "16 on 8 ranks, 4 from 16 on"
    assert OLD.by_size() == "16 on 8 ranks, 2 from 16 on, 1 from 64 on"


@pytest.mark.parametrize(
    ("versions", "environment", "expected"),
    [
        ({"torch": "2.13.0+cu130", "nvidia-nccl-cu13": "2.28.9"}, {}, Nccl(V28, True, 16)),
        ({"torch": "2.11.0", "nvidia-nccl-cu12": "2.28.9"}, {}, Nccl(V28, False, 16)),
        ({"torch": "2.13.0", "nvidia-nccl-cu12": "2.27.7"}, {}, Nccl(V27, False, 16)),
        ({"torch": "2.13.0+cpu"}, {}, None),
        ({"nvidia-nccl-cu12": "2.27.7"}, {"NCCL_MAX_P2P_PEERS": "2"}, None),
    ],
)
def test_what_pip_has_installed(monkeypatch, versions, environment, expected):
    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    assert Nccl.installed(16, environment) == expected
