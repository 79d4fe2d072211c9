"""Whether keys and values or their latent travel: what the cost model says of a ring."""

import pytest

from megatron_hdp.planner import CostModel
from megatron_hdp.planner.shape import RingWays

KV, LATENT = 81_920.0, 1_152.0  # of one layer, in BF16: 128 heads of 192 + 128, 512 + 64
MADE = 65_536.0  # what of the former is no head's alone left out


def ways(share=0.1, **others):
    base = CostModel.from_model_shape(
        num_layers=1,
        hidden_size=20_480,
        num_parameters=170e6,
        kv_bytes_per_token=KV,
        ranks_per_node=4,
        **others,
    )
    return RingWays.of(
        base,
        kv_bytes_per_token=KV,
        latent_bytes_per_token=LATENT,
        projection_share=share,
        made_bytes_per_token=MADE,
    )


def test_a_hop_of_the_latent_costs_four_projections_of_its_tokens():
    made = ways(share=0.25)
    projection_s = 2 * 0.25 * 170e6 / 400e12
    assert made.latent.merge_b == pytest.approx(4 * projection_s)
    assert (made.kv.merge_b, made.kv.kv_bytes_per_token) == (0.0, KV)
    assert made.latent.kv_bytes_per_token == LATENT


def test_the_latent_travels_where_attention_does_not_hide_keys_and_values():
    made = ways()
    across_nodes = list(range(8))
    assert made.latent_is_faster([8 * 4_096], across_nodes)
    assert not made.latent_is_faster([8 * 262_144], across_nodes)
    # within a node keys and values are fast enough
    assert not made.latent_is_faster([4 * 16_384], [0, 1, 2, 3])


def test_a_dear_projection_lets_keys_and_values_travel():
    assert not ways(share=1.0, flops_per_s=1e12).latent_is_faster([8 * 4_096], list(range(8)))


def test_members_of_a_ring_agree_whatever_their_order():
    made, ring = ways(), [3, 4, 5, 2]
    assert made.latent_is_faster([9_000, 300], ring) == made.latent_is_faster(
        [9_000, 300], ring[::-1]
    )


def test_as_many_heads_travel_made_as_a_hop_has_time_for():
    """The bytes that attention hides at the network's speed, but for those of the latents."""
    made, ring, tokens = ways(), list(range(8)), 8 * 4_096
    costs = made.latent
    hidden_s = costs.a * tokens**2 / 8 / 8 / 3  # a step's, forward
    room = hidden_s * costs.inter_node_bytes_per_s - 4_096 * LATENT
    share = made.made_share([tokens], 0, ring)
    assert 0 < share < 1 and share == pytest.approx(room / (4_096 * MADE))
    assert made.made_share([tokens // 100], 0, ring) == 0.0
    assert made.made_share([100 * tokens], 0, ring) == 1.0
    # a part: its queries see all keys before, which go around as well
    part = made.made_share([tokens], tokens, ring)
    seen = costs.a * 3 * tokens**2 / 8 / 8 / 3
    room = seen * costs.inter_node_bytes_per_s - 2 * 4_096 * LATENT
    assert part == pytest.approx(min(1.0, room / (2 * 4_096 * MADE)))
