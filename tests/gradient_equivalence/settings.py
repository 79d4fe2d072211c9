"""Settings that rows of several files share."""

from tests.gradient_equivalence.case import Settings

PP4 = {"pipeline_model_parallel_size": 4}
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "ddp_bucket_size": 1000}
SELECTIVE = {"recompute_granularity": "selective"}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform"}
RECOMPUTE |= {"recompute_num_layers": 1}
BLOCK = RECOMPUTE | {"recompute_method": "block"}
EVERY_MODULE = ("core_attn", "layernorm", "mlp", "shared_experts")
TIED = {"untie_embeddings_and_output_weights": False}
NO_BIAS = {"add_bias_linear": False}
ALONE = {"hdp_tokens_per_rank": 200}  # every sequence fits one rank
GQA: Settings = {}
MHA = {"num_query_groups": 4, "normalization": "LayerNorm", "swiglu": False} | TIED
MQA = {"num_query_groups": 1, "qk_layernorm": True, "add_qkv_bias": True}
MQA |= {"add_bias_linear": False, "rotary_percent": 0.5}
SINK = {"softmax_type": "learnable"}
OFF_BY_ONE = {"softmax_type": "off-by-one"}
SHORT = {"window_size": "9,0"}  # shorter than chunks of most plans
LONG = {"window_size": "70,0"}  # over several of them
MTP = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.7}
PARTS = "pipeline_model_parallel_layout"
IN_PARTS = {"hdp_sequence_parts": 5}
SHARED_EXPERTS = {"moe_shared_expert_intermediate_size": 20}


def layers(number: int) -> Settings:
    return {"num_layers": number}


def recomputing(*modules: str) -> Settings:
    """Selective recomputation of these modules."""
    return SELECTIVE | {"recompute_modules": modules}


def virtual(chunks: int, stages: int = 2) -> Settings:
    """Virtual stages with a layer each."""
    more = {"num_virtual_stages_per_pipeline_rank": chunks, "num_layers": stages * chunks}
    return more | {"pipeline_model_parallel_size": stages}


def every(pattern: str) -> Settings:
    return {"window_attn_skip_freq": pattern}
