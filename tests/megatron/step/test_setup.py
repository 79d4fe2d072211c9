"""What attention is told of a run before the first step."""

from dataclasses import replace

import pytest
import torch

from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.parallel import RankPlace
from megatron_hdp.megatron.step import setup
from megatron_hdp.runtime.attention import RunShapes

PLACE = RankPlace(
    hdp_rank=3,
    num_hdp_ranks=16,
    stage=0,
    num_stages=2,
    tensor_rank=1,
    num_tensor_ranks=4,
    lockstep_ranks=1,
    token_multiple=4,
)
ARGUMENTS = TrainingArguments(
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=96,
    seq_length=65_536,
    hdp_tokens_per_rank=8192,
)
KIND = torch.device("cpu"), torch.float32, 96
SHAPES = RunShapes(*KIND, heads=8, kv_heads=2, longest=65_536, tokens_per_rank=8192, num_ranks=16)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, SHAPES),
        ({"num_query_groups": 1}, replace(SHAPES, kv_heads=1)),
        (
            {"multi_latent_attention": True, "num_query_groups": 32},
            replace(SHAPES, kv_heads=8, head_dim=192, value_dim=128),
        ),
        ({"hdp_offload": "auto"}, replace(SHAPES, tokens_per_rank=65_536)),
    ],
    ids=[
        "tensor ranks share heads",
        "at least one head",
        "values of another size",
        "offload makes room",
    ],
)
def test_what_attention_is_asked_for(changes, expected):
    assert setup._shapes_of(replace(ARGUMENTS, **changes), PLACE) == expected
