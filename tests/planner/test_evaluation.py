"""The evaluator and the cost model against cases worked out by hand."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_hdp.planner import CostModel, Evaluation, evaluate
from tests.planner.problems import rings_of, small_plan

COST = CostModel(
    a=1.0,
    b=2.0,
    g=10.0,
    kv_bytes_per_token=1.0,
    intra_node_bytes_per_s=1e9,
    inter_node_bytes_per_s=1e9,
    ranks_per_node=4,
)
HALF = {"rank_speeds": (1.0, 1.0, 0.5, 1.0)}


def evaluated(**changes: Any) -> Evaluation:
    """The small plan by these costs."""
    return evaluate(small_plan(), dataclasses.replace(COST, **changes))


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
    # three steps of 24^2 / 9 = 64 s of attention, 64 / 3 forward and 128 / 3 backward; before two
    # of them a hop of 8 bytes forward, 16 backward: 40 and 80 s, of which 120 - 64 s are exposed
    result = evaluated(intra_node_bytes_per_s=0.2)
    assert result.exposed_s.tolist() == pytest.approx([2 * 56, 0, 0])
    assert result.duration_s[0] == pytest.approx(226 + 112)
    hidden = evaluated(intra_node_bytes_per_s=0.375)  # 8 / 0.375 = 64 / 3
    assert hidden.exposed_s.tolist() == pytest.approx([0, 0, 0])


def test_every_hop_takes_its_latency_in_each_layer_and_pass() -> None:
    # as above, hops of 40 and 80 s under 64 / 3 and 128 / 3 s; four layers of 2.5 s add 10 s each
    slow = evaluated(intra_node_bytes_per_s=0.2, intra_node_hop_s=2.5, num_layers=4)
    assert slow.exposed_s.tolist() == pytest.approx([2 * 76, 0, 0])
    # without bytes 4 x 8 s hide under 128 / 3 s of backward, and not under 64 / 3 s of forward
    latent = dataclasses.replace(COST, kv_bytes_per_token=0.0, intra_node_hop_s=8.0, num_layers=4)
    exposed_s = 2 * (32 - 64 / 3)
    assert evaluate(small_plan(), latent).exposed_s.tolist() == pytest.approx([exposed_s, 0, 0])
    # two stages of two layers are as many
    staged = dataclasses.replace(latent, num_layers=2)
    plan = small_plan(local_offsets=[0, 0, 0, 0], local_sequences=[], local_ranks=[])
    assert evaluate(plan, staged, 2).exposed_s[0] == pytest.approx(exposed_s)
    across = dataclasses.replace(latent, ranks_per_node=2, inter_node_hop_s=9.0)
    assert evaluate(small_plan(), across).exposed_s[0] == pytest.approx(2 * (36 - 64 / 3))


def test_a_double_ring_sends_on_the_links_of_all_members_of_a_node() -> None:
    # four ranks in nodes of two; a ring of all: 24 / 4 = 6 bytes a hop forward, twice backward
    plan = small_plan(
        rank_offsets=[0, 4, 5, 6],
        ranks=[0, 1, 2, 3, 3, 0],
        **{"local_offsets": [0, 0, 0, 0], "local_sequences": [], "local_ranks": []},
    )
    links = {"intra_node_bytes_per_s": 0.5, "inter_node_bytes_per_s": 0.1, "ranks_per_node": 2}
    plain = dataclasses.replace(COST, **links)
    step_s = 24**2 / 16
    hops_s = 3 * ((60 - step_s / 3) + (120 - 2 * step_s / 3))
    assert evaluate(plan, plain).exposed_s[0] == pytest.approx(hops_s)
    # two links: 6 / 0.2 = 30 s a hop, and 6 bytes of gradients home on one of them, not on two
    double = dataclasses.replace(plain, double_rings=True)
    hops_s = 3 * ((30 - step_s / 3) + (60 - 2 * step_s / 3))
    assert evaluate(plan, double).exposed_s[0] == pytest.approx(hops_s + 60 - 30)
    # within a node no hop is faster than the node's links
    assert evaluate(plan, dataclasses.replace(double, intra_node_bytes_per_s=0.15)).exposed_s[
        0
    ] == (pytest.approx(3 * ((40 - step_s / 3) + (80 - 2 * step_s / 3)) + 60 - 40))
    # three members of a node and one of another: groups of one
    apart = dataclasses.replace(double, ranks_per_node=3)
    assert evaluate(plan, apart).exposed_s[0] == evaluate(plan, plain).exposed_s[0]


def test_every_block_takes_its_time_in_each_layer_and_pass() -> None:
    # 2 passes x 5 layers x 0.5 s: three steps of the ring, one more on rank 2 for its local
    # sequence, one for each of the other two micro-batches
    result = evaluated(block_s=0.5, num_layers=5)
    assert result.duration_s.tolist() == pytest.approx([226 + 4 * 5, 109 + 5, 69 + 5])
    assert result.local_s.tolist() == pytest.approx([0, 0, 8 + 5, 0, 0])
    assert result.busy_s.tolist() == pytest.approx([233 + 74, 233, 246, 114])
    # rank 2 at half speed takes twice the time for them as well
    assert evaluated(block_s=0.5, num_layers=5, **HALF).duration_s[0] == pytest.approx(2 * 246)
    assert result.total_compute_s == pytest.approx(790)


def test_a_further_step_merges_each_token_of_a_member() -> None:
    # two further steps of the ring's three, 8 tokens on a member, 0.5 s each; nothing of it hides
    result = evaluated(intra_node_bytes_per_s=0.2, merge_b=0.5)
    assert result.exposed_s[0] == pytest.approx(112)
    assert result.duration_s.tolist() == pytest.approx([226 + 112 + 8, 109, 69])
    # rank 2 at half speed takes twice the time for it as well
    without, slow = (evaluated(intra_node_bytes_per_s=0.2, merge_b=b, **HALF) for b in (0.0, 0.5))
    assert slow.duration_s[0] == pytest.approx(without.duration_s[0] + 16)


def test_a_linear_term_of_attention_hides_traffic_and_one_of_experts_does_not() -> None:
    # the ring's 24 tokens: 24 x 1.5 s more, 12 s a member, 4 s a step
    attention = evaluated(intra_node_bytes_per_s=0.2, attention_b=1.5)
    experts = evaluated(intra_node_bytes_per_s=0.2, b_experts=1.5)
    assert attention.exposed_s[0] == pytest.approx(2 * (120 - 68))
    assert experts.exposed_s[0] == pytest.approx(2 * (120 - 64))
    assert attention.duration_s[0] == pytest.approx(218 + 12 + 104 + 8 + 2 * 1.5)
    assert experts.duration_s[0] == pytest.approx(218 + 12 + 112 + 8 + 2 * 1.5)
    assert attention.total_compute_s == experts.total_compute_s == pytest.approx(790 + 44 * 1.5)


def test_a_ring_that_leaves_its_node_runs_at_the_other_bandwidth() -> None:
    assert evaluated(inter_node_bytes_per_s=0.2).exposed_s[0] == 0
    split = evaluated(inter_node_bytes_per_s=0.2, ranks_per_node=2)  # ranks 0, 1 | 2, 3
    assert split.exposed_s[0] == pytest.approx(112)


def test_members_wait_for_each_other_at_the_start() -> None:
    # rank 0 works alone, then rings with rank 1, which rings with rank 2
    plan = rings_of([[0], [0, 1], [1, 2]], [9, 4, 4], num_ranks=4)
    result = evaluate(plan, COST)
    assert result.start_s.tolist() == pytest.approx([0, 109, 131])
    assert result.busy_s.tolist() == pytest.approx([131, 44, 22, 0])
    assert result.makespan_s == pytest.approx(153)


def test_the_bound_is_the_longest_sequence_where_that_is_longer() -> None:
    # one sequence of 24: 624 / D s, and D - 1 times what a step's 576 / D^2 s of attention leave of
    # a hop's 3 x 24 x 8 / D s: D = 2 gives 312 + 144, D = 3 208 + 2 x 128, D = 4 156 + 3 x 108
    links = {"intra_node_bytes_per_s": 1.0, "inter_node_bytes_per_s": 1.0}
    slow = dataclasses.replace(COST, g=0.0, kv_bytes_per_token=8.0, **links)
    plan = rings_of([range(4)], [24])
    result = evaluate(plan, slow)
    assert result.makespan_s == pytest.approx(480)
    assert result.lower_bound_s == pytest.approx(456)


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
        ('{"a": -1, "b": 1, "kv_bytes_per_token": 1}', r"cost\.json: .*a is -1; expected a finite"),
    ],
)
def test_bad_cost_model_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        CostModel.from_json(path)


def test_speeds_by_hand() -> None:
    # rank 2 at half speed: (208 + 8 local + g 10) / 0.5 = 452 s; rank 3 at double speed: 109 / 2;
    # then rank 0: 69
    result = evaluated(rank_speeds=(1.0, 1.0, 0.5, 2.0))
    assert result.duration_s.tolist() == pytest.approx([452, 54.5, 69])
    assert result.local_s.tolist() == pytest.approx([0, 0, 16, 0, 0])
    assert result.busy_s.tolist() == pytest.approx([218 + 69, 218, 452, 54.5])
    assert result.makespan_s == pytest.approx(521)
    assert result.efficiency == pytest.approx(790 / 4.5 / 521)
    # the sequence of 24 alone: rank 3 needs 634 / 2, ranks 3 and 0 (312 + 10), ranks 3, 0, 1
    # (208 + 10) / 1, all of them (156 + 10) / 0.5; the compute of all 790 / 4.5
    assert result.lower_bound_s == pytest.approx(218)


def test_a_slow_member_hides_more_traffic() -> None:
    # hops of 120 s; steps of 64 s, of 128 s on the slow rank: 2 x 56 s exposed on the others
    result = evaluated(intra_node_bytes_per_s=0.2, **HALF)
    assert result.exposed_s.tolist() == pytest.approx([112, 0, 0])
    assert result.duration_s[0] == pytest.approx(452)  # the slow rank still decides


def test_a_speed_for_each_rank() -> None:
    with pytest.raises(ValueError, match="rank_speeds has 3 entries; expected one for each of 4"):
        evaluated(rank_speeds=(1.0, 1.0, 0.5))


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
