"""Costs of tests that need some: a CPU's, as small models have them."""

from megatron_hdp.planner import CostModel

CPU = CostModel(
    a=1.5e-8,
    b=3.0e-5,
    g=0.015,
    kv_bytes_per_token=512,
    intra_node_bytes_per_s=4.0e7,
    inter_node_bytes_per_s=4.0e7,
)
"""configs/tiny-cpu.yaml on four ranks that share two cores; the bandwidth stands for hops."""
