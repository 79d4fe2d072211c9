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
SIGMOID = {
    "num_experts": 8,
    "moe_router_topk": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
}
GROUPS = SIGMOID | {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
DENSE_FIRST = {"num_layers": 3, "moe_layer_freq": "[0]+[1]*2"}
GPT_OSS = {
    "add_bias_linear": True,
    "swiglu": False,
    "quick_geglu": True,
    "activation_func_clamp_value": 0.4,
    "glu_linear_offset": 1.0,
}
EXPERT_MODELS = {
    "deepseek": GROUPS | SHARED_EXPERTS | DENSE_FIRST,
    "glm": SIGMOID | SHARED_EXPERTS | DENSE_FIRST,
    "qwen2-moe": SHARED_EXPERTS | {"moe_shared_expert_gate": True},
    "gpt-oss": GPT_OSS,
    "alternating": {"num_layers": 5, "moe_layer_freq": "2"},
}


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
