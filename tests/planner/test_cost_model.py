"""The cost model of an HDP rank of several GPUs."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.planner import LLAMA_7B, CostModel, evaluate, plan

NEW = ("attention_b", "b_experts", "block_s", "intra_node_hop_s", "inter_node_hop_s", "merge_b")


def test_tensor_ranks_compute_send_and_copy_side_by_side():
    shape = {"num_layers": 4, "hidden_size": 8, "num_parameters": 100, "kv_bytes_per_token": 64}
    one, four = CostModel.from_model_shape(**shape), CostModel.of_tensor_ranks(4, **shape)
    assert CostModel.of_tensor_ranks(1, **shape) == one
    assert (four.a, four.b) == (one.a / 4, one.b / 4)
    assert four.inter_node_bytes_per_s == 4 * one.inter_node_bytes_per_s
    assert four.host_bytes_per_s == 4 * one.host_bytes_per_s
    assert (one.ranks_per_node, four.ranks_per_node) == (8, 2)
    assert CostModel.of_tensor_ranks(16, **shape).ranks_per_node == 1
    assert four.kv_bytes_per_token == one.kv_bytes_per_token
    parts = {"attention_b": 8.0, "b_experts": 4.0, "merge_b": 12.0, "block_s": 1.0}
    parts["intra_node_hop_s"] = 2.0
    some = CostModel.of_tensor_ranks(4, **shape, **parts)
    assert (some.attention_b, some.b_experts, some.merge_b) == (2.0, 1.0, 3.0)
    assert (some.block_s, some.intra_node_hop_s) == (1.0, 2.0)  # of a layer, however wide


def test_experts_are_a_part_of_the_parameters():
    shape = {"num_layers": 4, "hidden_size": 8, "num_parameters": 100, "kv_bytes_per_token": 64}
    dense = CostModel.of_tensor_ranks(2, **shape)
    mixture = CostModel.of_tensor_ranks(2, **shape, expert_parameters=75)
    assert (mixture.b, mixture.b_experts) == pytest.approx((dense.b / 4, 3 * dense.b / 4))
    for wrong in (-1, 101):
        with pytest.raises(
            ValueError, match=f"expert_parameters is {wrong}; expected 0 to the 100"
        ):
            CostModel.from_model_shape(**shape, expert_parameters=wrong)


def test_a_file_without_latencies_is_one_with_none(tmp_path: Path):
    path = tmp_path / "cost.json"
    path.write_text('{"a": 1, "b": 2, "kv_bytes_per_token": 3}')
    found = CostModel.from_json(path)
    assert [getattr(found, name) for name in NEW] == [0.0] * 6
    some = dataclasses.replace(found, **{name: 0.5 for name in NEW})
    path.write_bytes(some.to_json())
    assert CostModel.from_json(path) == some


NO_TIMES = (math.nan, math.inf, -1.0, None, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({name: -1}, f"{name} is -1; expected a finite number >= 0") for name in NEW),
        *(({"g": value}, f"g is {value}; expected a finite number >= 0") for value in NO_TIMES),
        (
            {"inter_node_bytes_per_s": 0},
            "inter_node_bytes_per_s is 0; expected a finite number > 0",
        ),
        ({"ranks_per_node": 2.5}, r"ranks_per_node is 2\.5; expected an integer >= 1"),
        ({"a": 1e-9, "attention_points": ((5, 1.0),)}, "a is 1e-09 beside attention_points; exp"),
        ({"attention_b": 2, "attention_points": [(1, 1)]}, "attention_b is 2.0 beside attention_p"),
        ({"window_tokens": -1}, "window_tokens is -1; expected an integer from 0 to"),
        ({"window_tokens": 2.0}, "window_tokens is 2.0; expected an integer"),
        ({"window_share": 1.5}, "window_share is 1.5; expected a share of 0 to 1"),
        ({"window_share": 0.75}, "window_share is 0.75 without window_tokens; give both"),
        ({"projection_b": 2, "merge_b": 1}, "projection_b is 2.0, a part of merge_b, which is 1.0"),
        ({"doubt": 1}, "doubt is 1; expected a text"),
        ({"halo_bytes": -1.0}, "halo_bytes is -1.0; expected a finite number >= 0"),
    ],
    ids=str,
)
def test_bad_coefficients(changes: dict[str, object], message: str):
    with pytest.raises(ValueError, match=f"cost model: .*{message}"):
        CostModel(**{"a": 0, "b": 1, "kv_bytes_per_token": 1} | changes)


@pytest.mark.parametrize("more", [{}, {"g": 1.0, "block_s": 1.0, "attention_points": ((9, 0.0),)}])
def test_tokens_that_cost_nothing_are_refused_where_they_are_read(
    tmp_path: Path, more: dict[str, object]
):
    path = tmp_path / "costs.json"
    path.write_bytes(CostModel(a=0, b=0, kv_bytes_per_token=1, **more).to_json())
    with pytest.raises(ValueError, match="costs.json: found a, .* of 0, expected .* measure it"):
        CostModel.from_json(path)
    for some in ({"a": 1e-12}, {"attention_b": 1e-12}, {"b_experts": 1e-12}):
        model = CostModel(**{"a": 0, "b": 0, "kv_bytes_per_token": 1} | some)
        path.write_bytes(model.to_json())
        assert CostModel.from_json(path) == model


@pytest.mark.parametrize("value", NO_TIMES[:3])
def test_bad_speeds_of_compute(value: float):
    with pytest.raises(ValueError, match="flops_per_s"):
        CostModel.from_model_shape(2, 8, 1e3, 16, flops_per_s=value)


def test_attention_is_told_once():
    before = CostModel(a=1, b=1, kv_bytes_per_token=1, attention_b=2, b_experts=3, block_s=4)
    after = before.with_costs(lambda s: 5.0 * s, max_length=100)
    assert (after.attention_b, after.b_experts, after.block_s) == (0, 0, 4)
    assert after.b == pytest.approx(5)


def test_experts_are_planned_like_the_rest_of_what_is_linear():
    parts = CostModel(a=1e-6, b=1e-3, b_experts=3e-3, kv_bytes_per_token=1)
    whole = dataclasses.replace(parts, b=4e-3, b_experts=0)
    lengths = np.arange(1, 400, 7)
    arguments = {"ranks": 4, "tokens_per_rank": 200}
    made = [plan(lengths, cost_model=cost, **arguments) for cost in (parts, whole)]
    assert made[0].ranks.tolist() == made[1].ranks.tolist()
    assert evaluate(made[0], parts).makespan_s == evaluate(made[1], whole).makespan_s


def test_dear_blocks_keep_rings_narrow_and_dear_hops_in_a_node():
    lengths = [400_000] * 4 + [4096] * 600
    arguments = {"ranks": 64, "tokens_per_rank": 16_384}

    def widest(**changes: float) -> int:
        made = plan(lengths, cost_model=dataclasses.replace(LLAMA_7B, **changes), **arguments)
        return int(np.diff(made.rank_offsets).max())

    assert widest(block_s=1e-2) < widest()
    arguments["ranks"], lengths = 16, [80_000]
    assert widest(inter_node_hop_s=0.05) <= 8 < widest()
