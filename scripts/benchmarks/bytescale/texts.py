"""Where constants come from, and why a cell is below the paper: text for tables of the page."""

CONSTANTS = (
    (
        "attention_flops_per_s",
        "attention, both passes, FLOP/s (causal, 6 L H s^2)",
        "{:.3g}",
        "figure 21, 64K tokens in 5.08 s on 8 GPUs; figure 6a: 63.5 % of it is attention's square",
    ),
    (
        "linear_flops_per_s",
        "matrices, both passes, FLOP/s",
        "{:.3g}",
        "the rest of the 5.08 s, 6.2e9 parameters",
    ),
    (
        "network_bytes_per_s",
        "to another node, bytes/s",
        "{:.3g}",
        "case study: K and V of 8,192 tokens and a layer (32 MiB), two GPUs, in 1.5 ms",
    ),
    (
        "ring_traffic",
        "ring traffic of both passes, over that in BF16",
        "{:.3f}",
        "calibrated: the case study's baseline step takes 520 s",
    ),
    (
        "nvlink_bytes_per_s",
        "within a node, bytes/s",
        "{:.3g}",
        "NVIDIA's data sheet of the A800, 400 GB/s both ways",
    ),
    (
        "host_bytes_per_s",
        "to host memory, bytes/s",
        "{:.3g}",
        "figure 21: from ratio 0.6 to 1.0 1.11 s more for 12.8 GB",
    ),
    (
        "activation_bytes",
        "activations, bytes a token, layer and channel",
        "{:.0f}",
        "arXiv 2205.05198, section 4.1",
    ),
    ("tokens_per_rank", "capacity of a rank, tokens", "{:,}", "case study: 2M tokens at CP 256"),
    ("gpu_memory_bytes", "memory of a GPU, bytes", "{:.3g}", "its size gives TP, see below"),
    ("gpus_per_node", "GPUs of a node", "{}", "assumed"),
)

BY_BOUND = "no plan reaches it under these constants: the bound is below the paper's figure"
NEAR_BOUND = "the plan is within 7 % of the bound"
BY_PIPELINE = (
    "the pipeline: the longest micro-batch takes 20 s on a stage and no neighbour is as long, so "
    "that ranks idle 16 to 17 s of 78 to 90 (four batches, at four times the effort too); all "
    "cells run the plain schedule; virtual stages would cut that"
)
BY_PLAN = "the plan"
