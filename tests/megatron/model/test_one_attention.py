"""Ranks that would attend by different kernels stop before their rings would misunderstand."""

import pytest
import torch.distributed as dist

from megatron_hdp.megatron.step.setup import _require_one_attention
from megatron_hdp.runtime.attention.selection import Selection


class Named:
    def __init__(self, name):
        self.name = name


def take(names):
    name = names[dist.get_rank()]
    refused = {} if name == "transformer-engine 2.20.2" else {"transformer-engine": "OSError: no"}
    try:
        _require_one_attention(Selection(Named(name), refused))
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", ["torch-flash", "transformer-engine 2.20.2"])
def test_equal_ones_pass(run_ranks, name):
    assert run_ranks(2, take, [name] * 2) == [None, None]


def test_every_rank_raises_and_says_who_differs(run_ranks):
    names = ["transformer-engine 2.20.2", "transformer-engine 2.20.2", "torch-flash"]
    errors = run_ranks(3, take, names)
    assert errors[0] == errors[1] == errors[2]
    for expected in (
        "rank 0 by transformer-engine 2.20.2",
        "rank 2 by torch-flash; not transformer-engine: OSError: no",
        "--hdp-attention",
    ):
        assert expected in errors[0]
