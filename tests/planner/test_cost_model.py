"""The cost model of an HDP rank of several GPUs."""

from megatron_hdp.planner import CostModel


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
    parts = {"attention_b": 8.0, "b_experts": 4.0, "block_s": 1.0, "intra_node_hop_s": 2.0}
    some = CostModel.of_tensor_ranks(4, **shape, **parts)
    assert (some.attention_b, some.b_experts) == (2.0, 1.0)
    assert (some.block_s, some.intra_node_hop_s) == (1.0, 2.0)  # of a layer, however wide
