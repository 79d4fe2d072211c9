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
        None, minimum=1, maximum=_MOST_LAYERS, required=True, help="Number of transformer layers."
    )
    hidden_size: int = option(None, minimum=1, required=True, help="Hidden size.")
    ffn_hidden_size: int = option(
        None,
        minimum=1,
        help="Hidden size of the MLP. Default: 4 x hidden size, or 8/3 of it with --swiglu.",
    )
    num_attention_heads: int = option(
        None, minimum=1, required=True, help="Number of attention heads."
    )
    group_query_attention: bool = option(
        False, help="Share keys and values between attention heads."
    )
    num_query_groups: int = option(
        None,
        minimum=1,
        help="Number of key and value heads. Implies --group-query-attention, which alone means 1.",
    )
    kv_channels: int = option(
        None, minimum=1, help="Size of an attention head. Default: hidden size / attention heads."
    )
    seq_length: int = option(
        None, minimum=1, required=True, help="Context length: tokens of the longest sequence."
    )
    max_position_embeddings: int = option(
        None, minimum=1, help="Number of positions of the model. Default: --seq-length."
    )
    normalization: str = option(
        "LayerNorm", choices=("LayerNorm", "RMSNorm"), help="Kind of normalization layer."
    )
    norm_epsilon: float = option(
        1e-5, minimum=0.0, maximum=1.0, help="Epsilon of the normalization layers."
    )
    swiglu: bool = option(False, help="Use gated linear units with SiLU instead of GELU.")
    quick_geglu: bool = option(
        False, help="Use gated linear units with x sigmoid(1.702 x) instead of GELU."
    )
    activation_func_clamp_value: float | None = option(
        None,
        minimum=0.0,
        help="Clamp the inputs of a gated unit: its gate from above, its linear half on both "
        "sides.",
    )
    glu_linear_offset: float = option(
        0.0, help="Offset added to the linear half of a gated unit (gpt-oss: 1)."
    )
    untie_embeddings_and_output_weights: bool = option(
        False, help="Give the output layer its own weights instead of the embedding's."
    )
    add_bias_linear: bool = option(
        True, off_flag="--disable-bias-linear", help="Add a bias to linear layers."
    )
    add_qkv_bias: bool = option(
        False, help="Add a bias to the QKV projection, even without one in other linear layers."
    )
    qk_layernorm: bool = option(False, help="Normalize queries and keys.")
    init_method_std: float = option(
        0.02, minimum=0.0, help="Standard deviation of the initial weights."
    )
    attention_dropout: float = option(
        0.1, minimum=0.0, maximum=1.0, help="Dropout of attention. Must be 0 with HDP."
    )
    softmax_type: str = option(
        "vanilla",
        choices=("vanilla", "off-by-one", "learnable"),
        help="Softmax of attention. vanilla: plain. off-by-one: with a sink whose score is 0. "
        "learnable: with a sink whose score each head learns.",
    )
    window_size: str | None = option(
        None,
        metavar="N,0",
        help="Sliding window: a query sees N tokens before itself and none after. Default: all "
        "before.",
    )
    window_attn_skip_freq: str | None = option(
        None,
        metavar="N|LIST",
        help="Layers with full attention despite --window-size: every N-th, or those with 0 in a "
        "list like [1,0]*2. Default: none.",
    )
    hidden_dropout: float = option(
        0.1,
        minimum=0.0,
        maximum=1.0,
        help="Dropout of hidden states. With HDP, losses depend on the plan unless it is 0.",
    )
    vocab_size: int | None = option(
        None,
        minimum=1,
        maximum=2**24,
        help="Size of the vocabulary before padding. Default: the tokenizer's.",
    )
    make_vocab_size_divisible_by: int = option(
        128, minimum=1, maximum=2**20, help="Pad the vocabulary to a multiple of this number."
    )
    bf16: bool = option(False, help="Train in bfloat16 instead of float32.")
    fp64: bool = option(
        False, help="Train in float64 on CPUs, to prove that two runs are equal (not in Megatron)."
    )


@dataclass(frozen=True, kw_only=True)
class PositionOptions:
    """Positions."""

    position_embedding_type: str = option(
        "rope",
        choices=("rope", "yarn", "none"),
        help="Position embedding. rope: rotary. yarn: rotary, with frequencies scaled by YaRN. "
        "none: no layer has one.",
    )
    rotary_base: int = option(
        10000, minimum=1, maximum=2**53, help="Base of the rotary frequencies."
    )
    rotary_percent: float = option(
        1.0, minimum=0.0, maximum=1.0, help="Fraction of a head's channels that is rotated."
    )
    rotary_interleaved: bool = option(
        False, help="Rotate neighbouring channels together instead of the two halves of a head."
    )
    rotary_seq_len_interpolation_factor: int | None = option(
        None, minimum=1, help="Divide positions by this number, to reach a longer context."
    )
    use_rope_scaling: bool = option(False, help="Scale the rotary frequencies as Llama 3.1 does.")
    rope_scaling_factor: float = option(
        8.0,
        minimum=1.0,
        help="Factor of --use-rope-scaling. Megatron-LM's script reads this flag but always takes "
        "8.",
    )
    no_rope_freq: str | None = option(
        None,
        metavar="N|LIST",
        help="Layers without rotary positions: every N-th, or those with 1 in a list like "
        "([0]*3+[1])*2.",
    )
    rotary_scaling_factor: float = option(
        1.0, minimum=1.0, help="Factor by which YaRN extends the context."
    )
    yarn_original_max_position_embeddings: int = option(
        4096, minimum=1, help="Context length before YaRN: that of the original training."
    )
    yarn_beta_fast: float = option(
        32.0,
        minimum=0.0,
        help="Upper limit of YaRN's ramp, in rotations over the original context: it leaves faster "
        "frequencies unchanged.",
    )
    yarn_beta_slow: float = option(
        1.0,
        minimum=0.0,
        help="Lower limit of YaRN's ramp, in rotations over the original context: it divides "
        "slower frequencies by the whole factor.",
    )
    yarn_correction_range_round_to_int: bool = option(
        True, help="Round the limits of YaRN's ramp outwards to whole channels."
    )
    mscale: float = option(
        1.0,
        minimum=0.0,
        help="Strength of YaRN's attention scaling: how much it enlarges queries and keys as its "
        "factor grows.",
    )
    mscale_all_dim: float = option(
        0.0,
        minimum=0.0,
        help="Strength of the scaling that --mscale's is divided by. With MLA it applies to all "
        "channels.",
    )


@dataclass(frozen=True, kw_only=True)
class MtpOptions:
    """Multi-token prediction."""

    mtp_num_layers: int | None = option(
        None,
        minimum=1,
        maximum=16,
        help="Number of MTP layers: each predicts one more token after the next one.",
    )
    mtp_loss_scaling_factor: float = option(
        0.1, minimum=0.0, help="Weight of the mean loss of the MTP layers."
    )


@dataclass(frozen=True, kw_only=True)
class MoeOptions:
    """Mixture of experts."""

    num_experts: int | None = option(
        None, minimum=1, help="Number of experts of a layer. Default: none, a plain MLP."
    )
    moe_ffn_hidden_size: int | None = option(
        None, minimum=1, help="Hidden size of an expert. Default: --ffn-hidden-size."
    )
    moe_layer_freq: str = option(
        "1",
        metavar="N|PATTERN",
        help="Layers with experts: every N-th from the first on, or those with 1 in a list like "
        "'[0]*3+[1]*58'. The others have a plain MLP of --ffn-hidden-size.",
    )
    moe_shared_expert_intermediate_size: int | None = option(
        None,
        minimum=1,
        help="Hidden size of all shared experts together, which process every token.",
    )
    moe_shared_expert_gate: bool = option(
        False, help="Multiply the output of the shared experts by a learnt sigmoid gate."
    )
    moe_shared_expert_overlap: bool = option(
        False,
        help="Run the shared experts on a stream of their own, beside the exchange of tokens; "
        "needs --moe-token-dispatcher-type alltoall.",
    )
    moe_router_topk: int = option(2, minimum=1, help="Number of experts per token.")
    moe_router_score_function: str = option(
        "softmax",
        choices=("softmax", "sigmoid"),
        help="Function that turns the router's logits into scores.",
    )
    moe_router_pre_softmax: bool = option(
        False,
        help="Apply the softmax to all experts before the selection, instead of to the selected "
        "ones.",
    )
    moe_router_num_groups: int | None = option(
        None,
        minimum=1,
        help="Number of groups of experts. A token goes to --moe-router-group-topk of them.",
    )
    moe_router_group_topk: int | None = option(
        None, minimum=1, help="Number of groups per token, from which its experts are selected."
    )
    moe_router_topk_scaling_factor: float | None = option(
        None, minimum=0.0, help="Multiply the weights of a token's experts by this factor."
    )
    moe_router_enable_expert_bias: bool = option(
        False,
        help="Balance experts without a loss: a bias that only the selection sees rises after each "
        "step for experts with fewer tokens than the mean, and falls for those with more.",
    )
    moe_router_bias_update_rate: float = option(
        1e-3, minimum=0.0, help="Change of the expert bias per step."
    )
    moe_router_dtype: str | None = option(
        None,
        choices=("fp32", "fp64"),
        help="Precision of the router's logits and weights. Default: the model's, or fp64 with "
        "--fp64.",
    )
    moe_router_load_balancing_type: str = option(
        "aux_loss",
        choices=("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
        help="Kind of load balancing loss. HDP supports none and seq_aux_loss.",
    )
    moe_aux_loss_coeff: float = option(
        0.0, minimum=0.0, help="Weight of the load balancing loss (Megatron recommends 1e-2)."
    )
    moe_z_loss_coeff: float | None = option(
        None, minimum=0.0, help="Weight of the router's z-loss (Megatron recommends 1e-3)."
    )
    moe_token_dispatcher_type: str = option(
        "allgather",
        choices=("allgather", "alltoall", "flex"),
        help="How tokens reach their experts. Experts that span HDP ranks need alltoall or flex, "
        "which is DeepEP.",
    )
    expert_model_parallel_size: int = option(
        1, minimum=1, help="Number of ranks that share the experts of a layer."
    )
    expert_tensor_parallel_size: int = option(
        None,
        minimum=1,
        help="Number of ranks that share each expert. Default: --tensor-model-parallel-size.",
    )


@dataclass(frozen=True, kw_only=True)
class MlaOptions:
    """Multi-latent attention."""

    multi_latent_attention: bool = option(
        False, help="Keys and values of all heads come from one small latent (DeepSeek); needs HDP."
    )
    q_lora_rank: int | None = option(
        None, minimum=1, help="Size of the queries' latent (default: none, projected at once)."
    )
    kv_lora_rank: int = option(32, minimum=1, help="Size of the latent of keys and values.")
    qk_head_dim: int = option(
        128, minimum=1, help="Part of a query's and a key's head that is not rotated."
    )
    qk_pos_emb_head_dim: int = option(
        64, minimum=2, help="Part of them that is rotated; of keys it is one for all heads."
    )
    v_head_dim: int = option(128, minimum=1, help="Size of a value's head.")
    rope_type: str | None = option(
        None, choices=("rope", "yarn"), help="Rotary positions of latent attention (default: yarn)."
    )
