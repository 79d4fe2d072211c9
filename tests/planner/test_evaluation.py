"""The evaluator and the cost model against cases worked out by hand."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.planner import LLAMA_7B, CostModel, evaluate
from tests.planner.problems import small_plan

COST = CostModel(
    a=1.0,
    b=2.0,
    g=10.0,
    kv_bytes_per_token=1.0,
    intra_node_bytes_per_s=1e9,
    inter_node_bytes_per_s=1e9,
    ranks_per_node=4,
)


def test_small_plan_by_hand() -> None:
    # ring: (24^2 + 2 x 24) / 3 = 208, + g = 218; rank 2 has 2^2 + 2 x 2 = 8 more
    # rank 3: 9^2 + 18 + 10 = 109; then rank 0: (16 + 8) + (25 + 10) + 10 = 69
    result = evaluate(small_plan(), COST)
    assert result.duration_s.tolist() == pytest.approx([226, 109, 69])
    assert result.start_s.tolist() == pytest.approx([0, 0, 226])
    assert result.local_s.tolist() == pytest.approx([0, 0, 8, 0, 0])
    assert result.busy_s.tolist() == pytest.approx([218 + 69, 218, 226, 109])
    assert result.makespan_s == pytest.approx(226 + 69)
    assert result.total_compute_s == pytest.approx(624 + 8 + 99 + 24 + 35)
    assert result.efficiency == pytest.approx(790 / 4 / 295)
    assert result.ring_bytes == pytest.approx(3 * 3 * (2 / 3) * 24)  # 3 ranks x 3 (D-1)/D x tokens
    # the sequence of 24 on 4 ranks: 624 / 4 + 10 = 166 < 790 / 4
    assert result.lower_bound_s == pytest.approx(197.5)


def test_traffic_is_exposed_only_beyond_the_rings_own_attention() -> None:
    # each member sends 3 x 2/3 x 24 = 48 bytes; attention of the ring is 24^2 / 3 = 192 s
    slow = dataclasses.replace(COST, intra_node_bytes_per_s=0.2)  # 240 s: 48 exposed
    result = evaluate(small_plan(), slow)
    assert result.exposed_s.tolist() == pytest.approx([48, 0, 0])
    assert result.duration_s[0] == pytest.approx(226 + 48)
    hidden = dataclasses.replace(COST, intra_node_bytes_per_s=0.25)  # 192 s: just hidden
    assert evaluate(small_plan(), hidden).exposed_s.tolist() == pytest.approx([0, 0, 0])


def test_a_ring_that_leaves_its_node_runs_at_the_other_bandwidth() -> None:
    slow_network = dataclasses.replace(COST, inter_node_bytes_per_s=0.2)
    assert evaluate(small_plan(), slow_network).exposed_s[0] == 0
    split = dataclasses.replace(slow_network, ranks_per_node=2)  # ranks 0, 1 | 2, 3
    assert evaluate(small_plan(), split).exposed_s[0] == pytest.approx(48)


def test_members_wait_for_each_other_at_the_start() -> None:
    plan = small_plan(  # rank 0 works alone, then rings with rank 1, which rings with rank 2
        lengths=[9, 4, 4],
        rank_offsets=[0, 1, 3, 5],
        ranks=[0, 0, 1, 1, 2],
        sequence_offsets=[0, 1, 2, 3],
        sequences=[0, 1, 2],
        local_offsets=[0, 0, 0, 0],
        local_sequences=[],
        local_ranks=[],
    )
    result = evaluate(plan, COST)
    assert result.start_s.tolist() == pytest.approx([0, 109, 131])
    assert result.busy_s.tolist() == pytest.approx([131, 44, 22, 0])
    assert result.makespan_s == pytest.approx(153)


def test_the_bound_is_the_longest_sequence_where_that_is_longer() -> None:
    # one sequence of 24: compute / 4 ranks = 156 s, but traffic hides only up to D = 3:
    # max(576, 3 (D-1) 24 x 8) / D + 48 / D: D = 2 gives 312, D = 3 gives 400, D = 4 gives 444
    links = {"intra_node_bytes_per_s": 1.0, "inter_node_bytes_per_s": 1.0}
    slow = dataclasses.replace(COST, g=0.0, kv_bytes_per_token=8.0, **links)
    plan = small_plan(
        lengths=[24],
        rank_offsets=[0, 4],
        ranks=[0, 1, 2, 3],
        sequence_offsets=[0, 1],
        sequences=[0],
        local_offsets=[0, 0],
        local_sequences=[],
        local_ranks=[],
        offload_ratios=[0.0],
    )
    result = evaluate(plan, slow)
    assert result.makespan_s == pytest.approx(444)
    assert result.lower_bound_s == pytest.approx(312)


def test_cost_model_of_record() -> None:
    # 6 P s + 6 L H s^2 FLOP at 400 TFLOP/s
    s = 8192.0
    assert LLAMA_7B.b * s == pytest.approx(6 * 7e9 * s / 400e12)
    assert LLAMA_7B.a * s * s == pytest.approx(6 * 32 * 4096 * s * s / 400e12)
    assert (LLAMA_7B.g, LLAMA_7B.kv_bytes_per_token, LLAMA_7B.ranks_per_node) == (0, 131_072, 8)
    assert (LLAMA_7B.intra_node_bytes_per_s, LLAMA_7B.inter_node_bytes_per_s) == (300e9, 50e9)


def test_cost_model_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_bytes(COST.to_json())
    assert CostModel.from_json(path) == COST


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1', r"cost\.json: not JSON"),
        ("[1]", r"cost\.json: found list; expected an object"),
        ('{"a": 1, "b": 1}', "key 'kv_bytes_per_token' is missing"),
        (
            '{"a": 1, "b": 1, "kv_byte_per_token": 1}',
            "unknown key 'kv_byte_per_token'; nearest is ",
        ),
        ('{"a": -1, "b": 1, "kv_bytes_per_token": 1}', r"a is -1; expected a finite number >= 0"),
        ('{"a": null, "b": 1, "kv_bytes_per_token": 1}', "a is None; expected a finite number"),
        ('{"a": true, "b": 1, "kv_bytes_per_token": 1}', "a is True; expected a finite number"),
        (
            '{"a": 1, "b": 1, "kv_bytes_per_token": 1, "inter_node_bytes_per_s": 0}',
            "inter_node_bytes_per_s is 0; expected a finite number > 0",
        ),
        (
            '{"a": 1, "b": 1, "kv_bytes_per_token": 1, "ranks_per_node": 2.5}',
            r"ranks_per_node is 2\.5; expected an integer >= 1",
        ),
    ],
)
def test_bad_cost_model_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        CostModel.from_json(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_bad_numbers_in_a_cost_model(value: float) -> None:
    with pytest.raises(ValueError, match=f"cost model: g is {value}"):
        dataclasses.replace(COST, g=value)
    with pytest.raises(ValueError, match="flops_per_s"):
        CostModel.from_model_shape(2, 8, 1e3, 16, flops_per_s=value)


def test_speeds_by_hand() -> None:
    # rank 2 at half speed: (208 + 8 local + g 10) / 0.5 = 452 s; rank 3 at double speed: 109 / 2;
    # then rank 0: 69
    speeds = dataclasses.replace(COST, rank_speeds=(1.0, 1.0, 0.5, 2.0))
    result = evaluate(small_plan(), speeds)
    assert result.duration_s.tolist() == pytest.approx([452, 54.5, 69])
    assert result.local_s.tolist() == pytest.approx([0, 0, 16, 0, 0])
    assert result.busy_s.tolist() == pytest.approx([218 + 69, 218, 452, 54.5])
    assert result.makespan_s == pytest.approx(521)
    assert result.efficiency == pytest.approx(790 / 4.5 / 521)
    # the sequence of 24 alone: rank 3 needs 634 / 2, ranks 3 and 0 (312 + 10), ranks 3, 0, 1
    # (208 + 10) / 1, all of them (156 + 10) / 0.5; the compute of all 790 / 4.5
    assert result.lower_bound_s == pytest.approx(218)


def test_a_slow_member_hides_more_traffic() -> None:
    # 240 s of traffic; attention of 192 s, of 384 s on the slow rank: 48 s exposed on the others
    slow = dataclasses.replace(COST, intra_node_bytes_per_s=0.2, rank_speeds=(1.0, 1.0, 0.5, 1.0))
    result = evaluate(small_plan(), slow)
    assert result.exposed_s.tolist() == pytest.approx([48, 0, 0])
    assert result.duration_s[0] == pytest.approx(452)  # the slow rank still decides


def test_a_speed_for_each_rank() -> None:
    with pytest.raises(ValueError, match="rank_speeds has 3 entries; expected one for each of 4"):
        evaluate(small_plan(), dataclasses.replace(COST, rank_speeds=(1.0, 1.0, 0.5)))


def test_without_stages_forward_comes_first_and_backward_takes_two_thirds() -> None:
    result = evaluate(small_plan(), COST)
    assert result.pipeline_stages == 1
    assert result.forward_start_s.tolist() == [result.start_s.tolist()]
    assert result.backward_start_s[0].tolist() == pytest.approx([226 / 3, 109 / 3, 226 + 69 / 3])
    assert result.pipeline_bound_s == result.lower_bound_s


def test_results_cannot_be_changed() -> None:
    result = evaluate(small_plan(), COST)
    for field in dataclasses.fields(result):
        value = getattr(result, field.name)
        assert not (isinstance(value, np.ndarray) and value.flags.writeable), field.name
