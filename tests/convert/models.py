"""Tiny random models of every family, as transformers saves them."""

import torch
import transformers

VOCABULARY = 300
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_EXPERTS = {"num_experts_per_tok": 2, "head_dim": 12, "moe_intermediate_size": 12}
_SCALED = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0},
    **{"original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0},
}
_SIGMOID = {**_EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1}
_LATENT = {
    **{**_SIGMOID, "head_dim": 4, "num_key_value_heads": 4, "routed_scaling_factor": 2.5},
    **{"kv_lora_rank": 20, "qk_rope_head_dim": 4, "v_head_dim": 12, "qk_nope_head_dim": 8},
}

MODELS = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama3.1": ("Llama", {"rope_parameters": _SCALED, "max_position_embeddings": 16384}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 12}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3-moe": ("Qwen3Moe", {**_EXPERTS, "num_experts": 4, "norm_topk_prob": True}),
    "qwen3-moe-pre": ("Qwen3Moe", {**_EXPERTS, "num_experts": 4, "norm_topk_prob": False}),
    "glm": ("Glm4Moe", {**_SIGMOID, "attention_bias": True, "use_qk_norm": True}),
    "glm-air": ("Glm4Moe", {**_SIGMOID, "num_hidden_layers": 3, "routed_scaling_factor": 2.5}),
    "gpt-oss": (
        "GptOss",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12},
            **{"sliding_window": 16, "swiglu_limit": 0.5, "num_hidden_layers": 3},
            **{"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            "rope_parameters": {**_YARN, "truncate": False},
        },
    ),
    "gpt-oss-32": ("GptOss", {"num_local_experts": 4, "intermediate_size": 64, "head_dim": 12}),
    "mistral-window": ("Mistral", {"sliding_window": 16}),
    "deepseek": ("DeepseekV3", {**_LATENT, "q_lora_rank": 16, "n_group": 2, "topk_group": 1}),
    "deepseek-yarn": (
        "DeepseekV3",
        {
            **_LATENT,
            **{"q_lora_rank": None, "n_group": 1, "topk_group": 1},
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
}
"""Class and what its configuration has of its own."""


def config_of(name):
    """The configuration of a model of transformers."""
    kind, settings = MODELS[name]
    return getattr(transformers, f"{kind}Config")(**(_COMMON | settings))


def save_model(name, folder, *, dtype=torch.float32, **how):
    """Saves a model whose every number is random; returns its folder.

    Args:
        name: in `MODELS`.
        folder: to make.
        dtype: of the weights.
        how: arguments of save_pretrained.
    """
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{MODELS[name][0]}ForCausalLM")(config_of(name)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + (parameter.dim() == 1))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape))
    model.save_pretrained(folder, **how)
    return folder


def logits_of(folder, tokens):
    """What transformers gives for one sequence, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model.eval()(tokens[None]).logits[0]
