"""The options of multi-latent attention, under the names and defaults of Megatron's own flags."""

from dataclasses import dataclass

from megatron_hdp.options import option


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
