"""The options that say what the model is, under the names and defaults of Megatron's own flags.

A field without ``None`` in its type has a value once `parse_arguments` has returned: it is
required, or derived from others. Where a name or default differs from Megatron's, the help says so.
"""

from dataclasses import dataclass

from megatron_hdp.options import option

_MOST_LAYERS = 10_000


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Model."""

    num_layers: int = option(
        None, minimum=1, maximum=_MOST_LAYERS, required=True, help="Transformer layers."
    )
    hidden_size: int = option(None, minimum=1, required=True, help="Hidden size.")
    ffn_hidden_size: int = option(
        None, minimum=1, help="MLP size (default: 4 x hidden size, or 8/3 of it with --swiglu)."
    )
    num_attention_heads: int = option(None, minimum=1, required=True, help="Attention heads.")
    group_query_attention: bool = option(False, help="Share keys and values between heads.")
    num_query_groups: int = option(
        None,
        minimum=1,
        help="Key and value heads; implies --group-query-attention (default with it: 1).",
    )
    kv_channels: int = option(
        None, minimum=1, help="Size of a head (default: hidden size / attention heads)."
    )
    seq_length: int = option(
        None, minimum=1, required=True, help="Context length: tokens of the longest sequence."
    )
    max_position_embeddings: int = option(
        None, minimum=1, help="Positions of the model (default: --seq-length)."
    )
    normalization: str = option(
        "LayerNorm", choices=("LayerNorm", "RMSNorm"), help="Normalization layer."
    )
    norm_epsilon: float = option(
        1e-5, minimum=0.0, maximum=1.0, help="Epsilon of the normalization."
    )
    swiglu: bool = option(False, help="Gated linear units with SiLU instead of GELU.")
    quick_geglu: bool = option(
        False, help="Gated linear units with x sigmoid(1.702 x) instead of GELU."
    )
    activation_func_clamp_value: float | None = option(
        None,
        minimum=0.0,
        help="Clamp a gated unit: its gate from above, its linear half from both sides.",
    )
    glu_linear_offset: float = option(
        0.0, help="Added to the linear half of a gated unit (gpt-oss: 1)."
    )
    untie_embeddings_and_output_weights: bool = option(
        False, help="Give the output layer its own weights."
    )
    add_bias_linear: bool = option(
        True, off_flag="--disable-bias-linear", help="Remove the bias from linear layers."
    )
    add_qkv_bias: bool = option(False, help="Bias in the QKV projection only.")
    qk_layernorm: bool = option(False, help="Normalize queries and keys.")
    init_method_std: float = option(0.02, minimum=0.0, help="Standard deviation of the weights.")
    attention_dropout: float = option(
        0.1, minimum=0.0, maximum=1.0, help="Dropout of attention; must be 0 with HDP."
    )
    softmax_type: str = option(
        "vanilla",
        choices=("vanilla", "off-by-one", "learnable"),
        help="Softmax of attention: plain, or with a sink beside the keys, whose score is 0 or "
        "learnt by each head.",
    )
    window_size: str | None = option(
        None,
        metavar="N,0",
        help="Tokens before itself that a query sees, and none behind (default: all before).",
    )
    window_attn_skip_freq: str | None = option(
        None,
        metavar="N|LIST",
        help="With --window-size, layers that see all: every N-th, or 0 for each of them in a list "
        "like [1,0]*2, and 1 for those with a window (default: none).",
    )
    hidden_dropout: float = option(
        0.1,
        minimum=0.0,
        maximum=1.0,
        help="Dropout of hidden states; with HDP, losses depend on the plan unless it is 0.",
    )
    vocab_size: int | None = option(
        None,
        minimum=1,
        maximum=2**24,
        help="Entries of the vocabulary before padding, where they are more than the tokenizer's "
        "(default: those).",
    )
    make_vocab_size_divisible_by: int = option(
        128, minimum=1, maximum=2**20, help="Pad the vocabulary to a multiple of this."
    )
    bf16: bool = option(False, help="Train in bfloat16 (default: float32).")
    fp64: bool = option(
        False, help="Train in float64 on CPUs, to show that two runs are equal (not in Megatron)."
    )


@dataclass(frozen=True, kw_only=True)
class PositionOptions:
    """Positions."""

    position_embedding_type: str = option(
        "rope",
        choices=("rope", "yarn", "none"),
        help="Rotary positions, the same with frequencies scaled by YaRN, or none in any layer.",
    )
    rotary_base: int = option(
        10000, minimum=1, maximum=2**53, help="Base of the rotary frequencies."
    )
    rotary_percent: float = option(
        1.0, minimum=0.0, maximum=1.0, help="Share of a head's channels that is rotated."
    )
    rotary_interleaved: bool = option(
        False, help="Rotate neighbouring channels together instead of the two halves of a head."
    )
    rotary_seq_len_interpolation_factor: int | None = option(
        None, minimum=1, help="Divide positions by this, to reach a longer context."
    )
    use_rope_scaling: bool = option(False, help="Scale the rotary frequencies as Llama 3.1 does.")
    rope_scaling_factor: float = option(
        8.0,
        minimum=1.0,
        help="By how much, with --use-rope-scaling (Megatron-LM's script reads the flag and takes "
        "8 all the same).",
    )
    no_rope_freq: str | None = option(
        None,
        metavar="N|LIST",
        help="Layers without positions: every N-th, or 1 for each of them in a list like "
        "([0]*3+[1])*2.",
    )
    rotary_scaling_factor: float = option(
        1.0, minimum=1.0, help="By how much YaRN makes the context longer."
    )
    yarn_original_max_position_embeddings: int = option(
        4096, minimum=1, help="Context length that the frequencies were trained with, for YaRN."
    )
    yarn_beta_fast: float = option(
        32.0, minimum=0.0, help="Turns over that length from which YaRN leaves a frequency alone."
    )
    yarn_beta_slow: float = option(
        1.0, minimum=0.0, help="Turns up to which YaRN divides a frequency by the whole factor."
    )
    yarn_correction_range_round_to_int: bool = option(
        True, help="Do not round YaRN's range of frequencies outwards to whole channels."
    )
    mscale: float = option(
        1.0, minimum=0.0, help="How much YaRN enlarges queries and keys with its factor."
    )
    mscale_all_dim: float = option(
        0.0, minimum=0.0, help="The same for what it is divided by; with MLA for all channels."
    )


@dataclass(frozen=True, kw_only=True)
class MtpOptions:
    """Multi-token prediction."""

    mtp_num_layers: int | None = option(
        None,
        minimum=1,
        maximum=16,
        help="Tokens behind the next one that each token predicts, too, by a layer each.",
    )
    mtp_loss_scaling_factor: float = option(
        0.1, minimum=0.0, help="Weight of the mean of these layers' losses."
    )


@dataclass(frozen=True, kw_only=True)
class MoeOptions:
    """Mixture of experts."""

    num_experts: int | None = option(
        None, minimum=1, help="Experts of a layer (default: none, a plain MLP)."
    )
    moe_ffn_hidden_size: int | None = option(
        None, minimum=1, help="Size of an expert (default: --ffn-hidden-size)."
    )
    moe_layer_freq: str = option(
        "1",
        metavar="N|PATTERN",
        help="Which layers hold experts: every N-th from the first on, or a list with 1 for such a "
        "layer and 0 for a plain MLP of --ffn-hidden-size, like '[0]*3+[1]*58'.",
    )
    moe_shared_expert_intermediate_size: int | None = option(
        None, minimum=1, help="Size of the experts that every token meets, all together."
    )
    moe_shared_expert_gate: bool = option(
        False, help="Weigh what the shared experts give by a sigmoid of its own."
    )
    moe_router_topk: int = option(2, minimum=1, help="Experts that a token goes to.")
    moe_router_score_function: str = option(
        "softmax", choices=("softmax", "sigmoid"), help="Scores of a token's experts."
    )
    moe_router_pre_softmax: bool = option(
        False, help="Softmax over all experts before the choice instead of over the chosen after."
    )
    moe_router_num_groups: int | None = option(
        None, minimum=1, help="Groups of experts, of which a token goes to --moe-router-group-topk."
    )
    moe_router_group_topk: int | None = option(
        None, minimum=1, help="Groups that a token's experts are chosen from."
    )
    moe_router_topk_scaling_factor: float | None = option(
        None, minimum=0.0, help="Weights of a token's experts are multiplied by this."
    )
    moe_router_enable_expert_bias: bool = option(
        False,
        help="Balance without a loss: a bias, which the choice alone sees, goes up after each step "
        "for experts that got fewer tokens than the mean, and down for those that got more.",
    )
    moe_router_bias_update_rate: float = option(
        1e-3, minimum=0.0, help="How far that bias goes at a step."
    )
    moe_router_dtype: str | None = option(
        None,
        choices=("fp32", "fp64"),
        help="Precision of a router's logits and weights (default: the model's; --fp64: fp64).",
    )
    moe_router_load_balancing_type: str = option(
        "aux_loss",
        choices=("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
        help="What the balancing loss levels; with HDP none or seq_aux_loss.",
    )
    moe_aux_loss_coeff: float = option(
        0.0, minimum=0.0, help="Weight of the balancing loss (Megatron recommends 1e-2)."
    )
    moe_z_loss_coeff: float | None = option(
        None, minimum=0.0, help="Weight of the router's z-loss (Megatron recommends 1e-3)."
    )
    moe_token_dispatcher_type: str = option(
        "allgather",
        choices=("allgather", "alltoall"),
        help="How tokens reach their experts; experts across HDP ranks need alltoall.",
    )
    expert_model_parallel_size: int = option(
        1, minimum=1, help="Ranks that share the experts of a layer."
    )
    expert_tensor_parallel_size: int = option(
        None, minimum=1, help="Ranks that share an expert (default: --tensor-model-parallel-size)."
    )
